// SPDX-License-Identifier: Apache-2.0
/** The conversation as it is seen. */

import { element, icon, preview } from "./dom.js";
import { rendered } from "./markdown.js";

/** Distance to the end, in pixels, within which the log stays at its end. */
const FOLLOWS_PX = 40;
/** Milliseconds from one rendering of a reply that grows to the next. */
const SHOWN_MS = 80;
const SPOKEN = "Spoken";

/** @typedef {{root: HTMLElement, say(words: string): void, standBack(heard: number): void}} View */

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
    list.addEventListener("play", ({ target }) => this.hush(target), { capture: true });
    list.addEventListener("load", () => this.#follow(), { capture: true }); // an image had no height before
    new ResizeObserver(() => this.#follow()).observe(list);
  }

  /**
   * Show a question.
   * @param {string} text
   * @param {import("./media.js").Medium[]} media
   * @param {boolean} [isSpoken] whether its words come later, if at all
   * @returns {View}
   */
  ask(text, media, isSpoken = false) {
    const shown = media.map((medium) => preview(medium, true));
    const said = element("p", { className: isSpoken ? "said spoken" : "said", textContent: isSpoken ? SPOKEN : text });
    const parts = [...shown, ...(text || isSpoken ? [said] : [])];
    const root = element("article", { className: "question", ariaLabel: "You" }, parts);
    this.#add(root);
    const say = (/** @type {string} */ words) => {
      said.textContent = words || SPOKEN;
      said.classList.toggle("spoken", !words);
      this.#follow();
    };
    return { root, say, standBack: () => undefined };
  }

  /** An empty reply, to be filled. */
  reply() {
    const view = new ReplyView(() => this.#follow());
    this.#add(view.root);
    return view;
  }

  /** Only the welcome is left. */
  clear() {
    for (const medium of this.#list.querySelectorAll("[src], a[download]")) {
      URL.revokeObjectURL(medium.getAttribute("src") ?? medium.getAttribute("href") ?? "");
    }
    this.#list.replaceChildren(this.#welcome);
    this.#welcome.hidden = false;
    this.#isAtEnd = false;
  }

  /** Take messages away, as if they had not been. @param {(View | undefined)[]} views */
  remove(...views) {
    for (const view of views) {
      view?.root.remove();
    }
    this.#welcome.hidden = this.#list.children.length > 1;
  }

  /** True if nothing was said. */
  get isEmpty() {
    return this.#list.children.length === 1;
  }

  /** Silence what was replayed. @param {EventTarget | null} [but] what goes on */
  hush(but = null) {
    for (const sound of this.#list.querySelectorAll("audio, video")) {
      if (sound !== but) {
        /** @type {HTMLMediaElement} */ (sound).pause();
      }
    }
  }

  /** @param {Element} message */
  #add(message) {
    this.#welcome.hidden = true;
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

/** One reply: its text, what one may do with it, and its figures. */
export class ReplyView {
  #said = element("div", { className: "said" });
  #times = element("dl", { className: "times" });
  #note = element("p", { className: "note", hidden: true });
  #actions = element("div", { className: "actions" });
  #text = "";
  #due = 0;
  #grew;

  /** @param {() => void} grew called when it has become longer */
  constructor(grew) {
    this.#grew = grew;
    const parts = [this.#said, this.#note, this.#actions, this.#times];
    this.root = element("article", { className: "reply", ariaLabel: "Reply", ariaBusy: "true" }, parts);
  }

  /** @param {import("./reply.js").Reply} reply as far as it has come */
  show({ text, times }) {
    this.#text = text;
    this.#showTimes(times);
    this.#due ||= setTimeout(() => this.#render(text.length), SHOWN_MS);
  }

  /**
   * @param {import("./reply.js").Reply} reply that is over
   * @param {number} heard characters of its text that stay in the conversation
   * @param {number | null} seconds of its speech after which it was cut off; null where none was
   */
  end({ text, times, file, isStopped }, heard, seconds) {
    this.#text = text;
    this.#showTimes(times);
    this.root.ariaBusy = "false";
    this.#note.hidden = !isStopped && text !== "";
    this.#note.textContent = isStopped ? stopNote(seconds) : "The reply is empty.";
    this.#actions.replaceChildren(...actionsOf(text, file));
    this.#render(heard);
  }

  say() {}

  /** @param {number} heard characters that were heard; the rest stands back */
  standBack(heard) {
    this.#render(heard);
  }

  /** @param {number} heard */
  #render(heard) {
    clearTimeout(this.#due);
    this.#due = 0;
    this.#said.replaceChildren(...rendered(this.#text, this.root.ariaBusy === "true" ? undefined : heard));
    this.#grew();
  }

  /** @param {import("./reply.js").Times} times */
  #showTimes({ firstText, firstAudio, spoken, gaps }) {
    /** @type {[string, string | null][]} */
    const times = [
      ["First text", firstText === null ? null : inSeconds(firstText)],
      ["First audio", firstAudio === null ? null : inSeconds(firstAudio)],
      ["Speech", spoken ? inSeconds(spoken) : null],
      ["Gaps", gaps ? String(gaps) : null],
    ];
    const shown = times.filter(([, value]) => value !== null);
    this.#times.replaceChildren(...shown.map(([name, value]) => timeOf(name, value ?? "")));
  }
}

/**
 * @param {string} text
 * @param {Blob | null} file its speech
 */
function actionsOf(text, file) {
  const copy = action("Copy", "M9 9h10v10H9zM5 15V5h10");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    /** @type {Element} */ (copy.lastElementChild).textContent = "Copied";
  });
  const copies = text && window.isSecureContext ? [copy] : [];
  return file ? [...copies, ...replays(URL.createObjectURL(file))] : copies;
}

/** @param {string} url of a reply's speech */
function replays(url) {
  const sound = element("audio", { src: url, preload: "none" });
  const replay = action("Replay", "M5 12a7 7 0 1 0 2-5M5 4v4h4");
  replay.addEventListener("click", () => {
    const isPlaying = !sound.paused;
    sound.currentTime = 0;
    isPlaying ? sound.pause() : sound.play();
  });
  const save = element("a", { href: url, download: "reply.wav", className: "quiet", title: "Download" }, [
    icon("M12 4v11M7 11l5 5 5-5M5 20h14"),
    element("span", { textContent: "Download" }),
  ]);
  return [replay, save, sound];
}

/**
 * @param {string} name
 * @param {string} path of its icon
 */
function action(name, path) {
  return element("button", { type: "button", className: "quiet", title: name }, [
    icon(path),
    element("span", { textContent: name }),
  ]);
}

/** @param {number | null} heard seconds; null where nothing was spoken */
function stopNote(heard) {
  return heard === null ? "Stopped." : `Stopped after ${inSeconds(heard)} of speech.`;
}

/**
 * @param {string} name
 * @param {string} value
 */
function timeOf(name, value) {
  return element("div", {}, [element("dt", { textContent: name }), element("dd", { textContent: value })]);
}

/** @param {number} value */
function inSeconds(value) {
  return `${value.toFixed(2)} s`;
}
