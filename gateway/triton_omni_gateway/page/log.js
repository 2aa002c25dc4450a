// SPDX-License-Identifier: Apache-2.0
/** The conversation as it is seen. Whatever was said is set as text, never as HTML. */

import { element, preview } from "./dom.js";

/** Distance to the end, in pixels, within which the log stays at its end. */
const FOLLOWS_PX = 40;

export class Log {
  #list;
  #welcome;
  #isAtEnd = false;
  #top = 0;

  /** @param {HTMLElement} list */
  constructor(list) {
    this.#list = list;
    this.#welcome = /** @type {HTMLElement} */ (list.firstElementChild);
    list.addEventListener("scroll", () => this.#noteScroll());
    list.addEventListener("load", () => this.#follow(), { capture: true }); // of an image, which had no height before
    new ResizeObserver(() => this.#follow()).observe(list);
  }

  /**
   * Show a question; `remove` takes it away again.
   * @param {string} text
   * @param {import("./media.js").Medium[]} media
   */
  ask(text, media) {
    this.#welcome.hidden = true;
    const shown = media.map((medium) => preview(medium, true));
    const said = text ? [element("p", { className: "said", textContent: text })] : [];
    const message = element("article", { className: "question", ariaLabel: "You" }, [...shown, ...said]);
    this.#add(message);
    return message;
  }

  /** An empty reply, to be filled. */
  reply() {
    const view = new ReplyView(() => this.#follow());
    this.#add(view.root);
    return view;
  }

  /** Only the welcome is left. */
  clear() {
    for (const medium of this.#list.querySelectorAll("[src]")) {
      URL.revokeObjectURL(medium.getAttribute("src") ?? "");
    }
    this.#list.replaceChildren(this.#welcome);
    this.#welcome.hidden = false;
    this.#isAtEnd = false;
  }

  /** Take messages away, as if they had not been. @param {Element[]} messages */
  remove(...messages) {
    for (const message of messages) {
      message.remove();
    }
    this.#welcome.hidden = this.#list.children.length > 1;
  }

  /** @param {Element} message */
  #add(message) {
    this.#list.append(message);
    this.#isAtEnd = true;
    this.#follow();
  }

  /** Only whoever scrolls up leaves the end: the log's own height changes too, as the parts around it do. */
  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.#list;
    const isNear = scrollHeight - scrollTop - clientHeight < FOLLOWS_PX;
    if (isNear || scrollTop < this.#top) {
      this.#isAtEnd = isNear;
    }
    this.#top = scrollTop;
  }

  #follow() {
    if (this.#isAtEnd) {
      this.#list.scrollTop = this.#list.scrollHeight;
    }
  }
}

/** One reply: what was heard of its text, what is still ahead, and its times. */
export class ReplyView {
  #heard = element("span", { className: "heard" });
  #ahead = element("span", { className: "ahead" });
  #times = element("dl", { className: "times" });
  #note = element("p", { className: "note", hidden: true });
  #grew;

  /** @param {() => void} grew called when it has become longer */
  constructor(grew) {
    this.#grew = grew;
    const text = element("p", { className: "said" }, [this.#heard, this.#ahead]);
    this.root = element("article", { className: "reply", ariaLabel: "Reply", ariaBusy: "true" }, [
      text,
      this.#note,
      this.#times,
    ]);
  }

  /** @param {import("./reply.js").Account} account */
  show(account) {
    setText(this.#heard, account.heard);
    setText(this.#ahead, account.text.slice(account.heard.length));
    this.#showTimes(account);
    this.#grew();
  }

  /**
   * @param {import("./reply.js").Account} account
   * @param {string} kept what stays in the conversation
   * @param {boolean} isStopped whether it was cut off
   */
  end(account, kept, isStopped) {
    this.show({ ...account, text: kept, heard: kept });
    this.root.ariaBusy = "false";
    this.#note.hidden = !isStopped && kept !== "";
    this.#note.textContent = isStopped ? stopNote(kept, account.heardSeconds) : "The reply is empty.";
    this.#grew();
  }

  /** @param {import("./reply.js").Account} account */
  #showTimes({ firstText, firstAudio, spoken, gaps }) {
    /** @type {[string, string | null][]} */
    const times = [
      ["First text", firstText === null ? null : seconds(firstText)],
      ["First audio", firstAudio === null ? null : seconds(firstAudio)],
      ["Speech", spoken ? seconds(spoken) : null],
      ["Gaps", gaps ? String(gaps) : null],
    ];
    const shown = times.filter(([, value]) => value !== null);
    if (this.#times.children.length === shown.length) {
      for (const [at, [, value]] of shown.entries()) {
        setText(this.#times.children[at].lastElementChild, value ?? "");
      }
    } else {
      this.#times.replaceChildren(...shown.map(([name, value]) => timeOf(name, value ?? "")));
    }
  }
}

/**
 * @param {string} kept
 * @param {number | null} heard seconds; null where nothing was spoken
 */
function stopNote(kept, heard) {
  if (heard === null) {
    return kept ? "Stopped. What you see is kept." : "Stopped before anything came.";
  }
  return kept
    ? `Stopped after ${seconds(heard)} of speech. What you heard is kept.`
    : "Stopped before a word was heard.";
}

/**
 * @param {string} name
 * @param {string} value
 */
function timeOf(name, value) {
  return element("div", {}, [element("dt", { textContent: name }), element("dd", { textContent: value })]);
}

/** @param {number} value */
function seconds(value) {
  return `${value.toFixed(2)} s`;
}

/**
 * @param {Element | null} node
 * @param {string} text
 */
function setText(node, text) {
  if (node && node.textContent !== text) {
    node.textContent = text;
  }
}
