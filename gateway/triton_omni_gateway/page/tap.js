// SPDX-License-Identifier: Apache-2.0
/**
 * Runs on the audio thread: hands the microphone's samples to the page at 16 kHz, a fiftieth of a second at a time.
 *
 * The samples that come hold no frequency that 16 kHz cannot have, so a sample between two others lies on their line.
 */

/** @type {any} The globals of an AudioWorklet. */
const worklet = globalThis;
const RATE = 16000;
const STEP = worklet.sampleRate / RATE;

class Tap extends worklet.AudioWorkletProcessor {
  #piece = new Float32Array(RATE / 50);
  #filled = 0;
  /** Place of the next sample among those that come, and the one before them. */
  #at = 0;
  #before = 0;

  /** @param {Float32Array[][]} inputs of 128 samples a channel */
  process([[samples]]) {
    if (samples) {
      for (; this.#at < samples.length; this.#at += STEP) {
        const next = Math.floor(this.#at);
        const last = next ? samples[next - 1] : this.#before;
        this.#put(last + (samples[next] - last) * (this.#at - next));
      }
      this.#at -= samples.length;
      this.#before = samples[samples.length - 1];
    }
    return true;
  }

  /** @param {number} sample */
  #put(sample) {
    this.#piece[this.#filled] = sample;
    this.#filled += 1;
    if (this.#filled === this.#piece.length) {
      this.port.postMessage(this.#piece);
      this.#filled = 0;
    }
  }
}

worklet.registerProcessor("tap", Tap);
