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
 * @property {(piece: Float32Array) => void} hear what the microphone hears, at 16 kHz
 * @property {() => void} end the user wants to talk no more
 * @property {() => void} change the microphone was opened or let go
 * @property {(message: string) => void} fail there is no microphone to speak into
 */

export class Talk {
  #button = byId("talk", HTMLButtonElement);
  #microphone = new Microphone((piece) => this.#hear(piece));
  #told;
  /** True from the press that opens the microphone to the one that closes it. */
  isOn = false;
  /** True while the microphone is heard: some take a second to open, and users to allow it. */
  isHeard = false;

  /** @param {Told} told */
  constructor(told) {
    this.#told = told;
    byId("no-microphone", HTMLElement).hidden = Microphone.isAllowed;
    this.#button.addEventListener("click", () => (this.isOn ? this.#end() : this.#begin()));
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
    this.#microphone.close();
    this.#mark(false);
  }

  async #begin() {
    this.#mark(true);
    try {
      const isAwaited = await this.#told.begin();
      if (isAwaited && this.isOn) {
        await this.#microphone.open();
      } else {
        this.#mark(false);
      }
    } catch (error) {
      this.#mark(false);
      this.#told.fail(/** @type {Error} */ (error).message);
    }
  }

  #end() {
    this.off();
    this.#told.end();
  }

  /** @param {Float32Array} piece */
  #hear(piece) {
    if (this.isOn) {
      this.level = loudness(piece);
      this.#told.hear(piece);
      if (!this.isHeard) {
        this.isHeard = true;
        this.#told.change();
      }
    } else {
      this.#microphone.close(); // pressed again while it was being opened
    }
  }

  /** @param {boolean} isOn */
  #mark(isOn) {
    this.isOn = isOn;
    this.isHeard = false;
    this.level = 0;
    this.#button.ariaPressed = String(isOn);
    this.#told.change();
  }
}
