// SPDX-License-Identifier: Apache-2.0
/** The draft of the next message: text, and files that were chosen, dropped or pasted. */

import { byId, element, preview } from "./dom.js";
import { mediumOf } from "./media.js";

/**
 * @typedef {{text: string, media: import("./media.js").Medium[]}} Draft
 * @typedef {object} Told
 * @property {() => void} send the user sends the draft
 * @property {(message: string) => void} refuse a file cannot be taken
 */

export class Composer {
  #form = byId("composer", HTMLFormElement);
  #text = byId("text", HTMLTextAreaElement);
  #list = byId("attachments", HTMLUListElement);
  #send = byId("send", HTMLButtonElement);
  #attach = byId("attach", HTMLButtonElement);
  /** @type {import("./media.js").Medium[]} */
  #media = [];
  #isReady = false;
  #told;

  /** @param {Told} told */
  constructor(told) {
    this.#told = told;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.#text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    this.#text.addEventListener("input", () => this.#allow());
    this.#takeFiles();
  }

  /** True if nothing is written and nothing attached. */
  get isEmpty() {
    return this.#text.value.trim() === "" && this.#media.length === 0;
  }

  /** Let the draft be sent, or not yet. */
  set isReady(/** @type {boolean} */ ready) {
    this.#isReady = ready;
    this.#allow();
  }

  /** The draft, which is empty afterwards. @returns {Draft} */
  take() {
    const draft = { text: this.#text.value.trim(), media: this.#media };
    this.#text.value = "";
    this.#media = [];
    this.#show();
    return draft;
  }

  /** Take the attached files: none is attached afterwards. */
  takeMedia() {
    const media = this.#media;
    this.#media = [];
    this.#show();
    return media;
  }

  /** Write a question for the user. @param {string} text */
  write(text) {
    this.#text.value = text;
    this.#allow();
  }

  /** Put a draft back, in front of what was written since. @param {Draft} draft */
  restore({ text, media }) {
    this.#text.value = [text, this.#text.value].filter(Boolean).join("\n");
    this.#media = [...media, ...this.#media];
    this.#show();
  }

  /** Attach files. @param {Iterable<File>} files */
  async attach(files) {
    for (const file of files) {
      try {
        this.#media.push(await mediumOf(file));
      } catch (error) {
        this.#told.refuse(/** @type {Error} */ (error).message);
      }
      this.#show();
    }
  }

  /** Take the focus, but not to the text on a phone: its keyboard would cover the conversation. */
  focus() {
    const { matches: isTouched } = matchMedia("(pointer: coarse)");
    (isTouched ? this.#attach : this.#text).focus();
  }

  /** Send the draft, if there is one and it may be sent. */
  submit() {
    if (this.#isReady && !this.isEmpty) {
      this.#told.send();
    }
  }

  #allow() {
    this.#send.disabled = !this.#isReady || this.isEmpty;
  }

  #show() {
    this.#allow();
    this.#list.hidden = this.#media.length === 0;
    this.#list.replaceChildren(...this.#media.map((medium) => this.#chip(medium)));
  }

  /** @param {import("./media.js").Medium} medium */
  #chip(medium) {
    const drop = element("button", { type: "button", textContent: "×", ariaLabel: `Remove ${medium.name}` });
    drop.addEventListener("click", () => {
      URL.revokeObjectURL(medium.url);
      this.#media = this.#media.filter((other) => other !== medium);
      this.#show();
      this.focus();
    });
    const name = element("span", { textContent: medium.name });
    return element("li", { className: medium.kind }, [preview(medium, medium.kind === "audio"), name, drop]);
  }

  #takeFiles() {
    const chosen = byId("files", HTMLInputElement);
    const area = byId("drop", HTMLElement);
    this.#attach.addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => {
      this.attach([...(chosen.files ?? [])]);
      chosen.value = "";
    });
    addEventListener("paste", (event) => {
      const files = event.clipboardData?.files ?? [];
      if (files.length) {
        event.preventDefault();
        this.attach(files);
      }
    });
    addEventListener("dragover", (event) => {
      event.preventDefault();
      area.hidden = !event.dataTransfer?.types.includes("Files");
    });
    addEventListener("dragleave", (event) => {
      area.hidden ||= event.relatedTarget === null;
    });
    addEventListener("drop", (event) => {
      event.preventDefault();
      area.hidden = true;
      this.attach(event.dataTransfer?.files ?? []);
    });
  }
}
