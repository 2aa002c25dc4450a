// SPDX-License-Identifier: Apache-2.0
/** The large control: pressed once, the microphone is open until it is pressed again. */

import { byId } from "./dom.js";
import { Microphone } from "./microphone.js";
import { loudness } from "./sound.js";

/** Loudness that fills the ring: root mean square of full scale. */
const FULL = 0.2;

/**
 * @typedef {object} Told
 * @property {() => Promise<boolean>} begin the user wants to talk; fulfilled with whether somebody can listen
 * @property {() => void} heard the microphone is heard from now on
 * @property {(piece: Float32Array) => void} hear what it hears, at 16 kHz
 * @property {() => void} end the user, who was heard, wants to talk no more
 * @property {() => void} change a press was taken, or the microphone let go
 * @property {(message: string) => void} fail there is no microphone to speak into
 */

export class Talk {
  #button = byId("talk", HTMLButtonElement);
  #told;
  /** The one of the last press: each press has its own, so that one which opens late is told from it.
   * @type {Microphone | null} */
  #microphone = null;
  /** True while the microphone is heard: some take a second to open, and users to allow it. */
  isHeard = false;

  /** @param {Told} told */
  constructor(told) {
    this.#told = told;
    byId("no-microphone", HTMLElement).hidden = Microphone.isAllowed;
    this.#button.addEventListener("click", () => (this.isOn ? this.#end() : this.#begin()));
  }

  /** True from the press that opens the microphone to the one that closes it. */
  get isOn() {
    return this.#microphone !== null;
  }

  /** Allow a press, or not yet. */
  set isReady(/** @type {boolean} */ ready) {
    this.#button.disabled = !Microphone.isAllowed || !(ready || this.isOn);
  }

  /** @param {number} level loudness of who speaks */
  set level(level) {
    this.#button.style.setProperty("--level", Math.min(1, level / FULL).toFixed(2));
  }

  /** Let the microphone go. */
  off() {
    this.#microphone?.close();
    this.#mark(null);
  }

  async #begin() {
    const microphone = new Microphone({ hear: (piece) => this.#hear(piece), fail: (message) => this.#fail(message) });
    this.#mark(microphone);
    const isAwaited = await this.#told.begin();
    if (this.#microphone !== microphone) {
      return; // pressed again meanwhile
    }
    if (isAwaited) {
      microphone.open();
    } else {
      this.off();
    }
  }

  #end() {
    const wasHeard = this.isHeard;
    this.off();
    if (wasHeard) {
      this.#told.end();
    }
  }

  /** @param {string} message */
  #fail(message) {
    this.#end();
    this.#told.fail(message);
  }

  /** @param {Float32Array} piece */
  #hear(piece) {
    if (!this.isHeard) {
      this.isHeard = true;
      this.#told.heard();
    }
    this.level = loudness(piece);
    this.#told.hear(piece);
  }

  /** @param {Microphone | null} microphone */
  #mark(microphone) {
    this.#microphone = microphone;
    this.isHeard = false;
    this.level = 0;
    this.#button.ariaPressed = String(this.isOn);
    this.#told.change();
  }
}
