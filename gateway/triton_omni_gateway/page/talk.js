// SPDX-License-Identifier: Apache-2.0
/** The microphone's button and the hands-free switch. Whoever begins to speak cuts the reply off. */

import { byId } from "./dom.js";
import { Microphone } from "./microphone.js";
import { loudness } from "./sound.js";
import { SpeechGate } from "./speechgate.js";

/** A press shorter than this begins a recording that the next press ends, in milliseconds. */
const TAP_MS = 400;

/**
 * @typedef {object} Told
 * @property {() => Promise<void>} begin the user wants to speak; fulfilled when nobody else does
 * @property {() => void} listen what the user says is recorded from now on
 * @property {(recording: import("./recording.js").Recording) => void} grow the recording has grown
 * @property {(speech: File | null) => void} end the user has spoken; null where nothing was recorded
 * @property {(message: string) => void} fail there is no microphone to speak into
 */

export class Talk {
  #button = byId("talk", HTMLButtonElement);
  #handsFree = byId("hands-free", HTMLInputElement);
  #microphone = new Microphone((piece, seconds) => this.#listen(piece, seconds));
  #gate = new SpeechGate();
  #isRecording = false;
  /** What the user says, once nobody else speaks. @type {import("./recording.js").Recording | null} */
  #recording = null;
  #pressedAt = 0;
  #told;

  /** @param {Told} told */
  constructor(told) {
    this.#told = told;
    if (!Microphone.isAllowed) {
      this.#button.disabled = this.#handsFree.disabled = true;
      this.#button.title = "Browsers offer a microphone only to pages over HTTPS or of this machine";
    }
    this.#button.addEventListener("pointerdown", (event) => this.#press(event));
    this.#button.addEventListener("pointerup", () => this.#release());
    this.#button.addEventListener("pointercancel", () => this.#release());
    this.#button.addEventListener("contextmenu", (event) => event.preventDefault());
    this.#button.addEventListener("click", (event) => {
      // A pointer's click was told by its press and release; this one is of a keyboard or a screen reader.
      if (event.detail === 0) {
        this.#toggle();
      }
    });
    this.#handsFree.addEventListener("change", () => this.#switch());
  }

  /** Whether the user's speech is being recorded. */
  get isRecording() {
    return this.#isRecording;
  }

  /** Drop what was recorded. */
  async cancel() {
    this.#mark(false);
    await this.#microphone.take();
    this.#rest();
  }

  /** @param {PointerEvent} event */
  #press(event) {
    if (event.button === 0) {
      this.#button.setPointerCapture(event.pointerId);
      this.#pressedAt = this.#isRecording ? Number.POSITIVE_INFINITY : event.timeStamp;
      this.#toggle();
    }
  }

  #release() {
    if (this.#isRecording && performance.now() - this.#pressedAt >= TAP_MS) {
      this.#end();
    }
  }

  #toggle() {
    if (this.#isRecording) {
      this.#end();
    } else {
      this.#begin();
    }
  }

  async #begin() {
    this.#mark(true);
    const quiet = this.#told.begin();
    const isOpen = await this.#opens();
    if (!isOpen || !this.#isRecording) {
      this.#rest();
      return;
    }
    const recording = this.#microphone.record();
    await quiet;
    if (this.#isRecording) {
      this.#recording = recording;
      this.#told.listen();
    }
  }

  async #end() {
    this.#mark(false);
    const speech = await this.#microphone.take();
    this.#rest();
    this.#told.end(speech);
  }

  /** Let the microphone go, unless it listens all the time. */
  #rest() {
    if (!this.#handsFree.checked) {
      this.#microphone.close();
    }
  }

  async #opens() {
    try {
      await this.#microphone.open();
      return true;
    } catch (error) {
      this.#mark(false);
      this.#handsFree.checked = false;
      this.#told.fail(/** @type {Error} */ (error).message);
      return false;
    }
  }

  async #switch() {
    this.#gate = new SpeechGate();
    if (this.#handsFree.checked) {
      await this.#opens();
    } else if (this.#isRecording) {
      await this.cancel();
    }
    this.#rest();
  }

  /**
   * @param {Float32Array} piece
   * @param {number} seconds
   */
  #listen(piece, seconds) {
    const level = loudness(piece);
    this.#button.style.setProperty("--level", String(Math.min(1, level * 4)));
    if (this.#recording) {
      this.#told.grow(this.#recording);
    }
    const change = this.#handsFree.checked ? this.#gate.feed(level, seconds) : null;
    if (change === "begin" && !this.#isRecording) {
      this.#begin();
    } else if (change === "end" && this.#isRecording) {
      this.#end();
    }
  }

  /** @param {boolean} isRecording */
  #mark(isRecording) {
    this.#isRecording = isRecording;
    this.#recording = null;
    this.#button.ariaPressed = String(isRecording);
    this.#button.style.setProperty("--level", "0");
  }
}
