// SPDX-License-Identifier: Apache-2.0
/** Runs on the audio thread: hands the microphone's samples to the page, a fiftieth of a second at a time. */

/** @type {any} The globals of an AudioWorklet. */
const worklet = globalThis;
const PIECES_A_SECOND = 50;

class Tap extends worklet.AudioWorkletProcessor {
  #piece = new Float32Array(Math.round(worklet.sampleRate / PIECES_A_SECOND));
  #filled = 0;

  /** @param {Float32Array[][]} inputs of 128 samples a channel */
  process([[samples]]) {
    for (const sample of samples ?? []) {
      this.#piece[this.#filled] = sample;
      this.#filled += 1;
      if (this.#filled === this.#piece.length) {
        this.port.postMessage(this.#piece);
        this.#filled = 0;
      }
    }
    return true;
  }
}

worklet.registerProcessor("tap", Tap);
