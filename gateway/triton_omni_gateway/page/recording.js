// SPDX-License-Identifier: Apache-2.0
/** One recording of the microphone, as a question takes it. A part that was given stays the same in the whole. */

import { QUESTION_RATE, wavFile } from "./sound.js";

/** Samples at the end that resamplers may still change when more follows. */
const UNSETTLED = QUESTION_RATE / 100;

/** @typedef {(pieces: Float32Array[], rate: number) => Promise<Float32Array>} Resample to the rate of questions */

export class Recording {
  #pieces;
  #rate;
  #resample;
  #given = new Float32Array();
  #isOver = false;

  /**
   * @param {Float32Array[]} pieces its beginning
   * @param {number} rate their samples a second
   * @param {Resample} resample
   */
  constructor(pieces, rate, resample = resampled) {
    this.#pieces = [...pieces];
    this.#rate = rate;
    this.#resample = resample;
  }

  /** Samples, at the rate of questions, that will not change any more. */
  get length() {
    return Math.max(0, Math.floor((lengthOf(this.#pieces) * QUESTION_RATE) / this.#rate) - UNSETTLED);
  }

  /** @param {Float32Array} piece comes after all others */
  push(piece) {
    this.#pieces.push(piece);
  }

  /**
   * A WAV file of its first samples.
   * @param {number} samples at most its length
   * @returns {Promise<File | null>} null where the recording has ended meanwhile
   */
  async beginning(samples) {
    const all = await this.#all();
    if (this.#isOver) {
      return null;
    }
    this.#given = all.slice(0, samples);
    return fileOf(this.#given);
  }

  /**
   * End it.
   * @returns {Promise<File | null>} a WAV file of all; null where there is nothing
   */
  async end() {
    this.#isOver = true;
    return this.#pieces.length ? fileOf(await this.#all()) : null;
  }

  /** All samples so far, those that were given as they were. */
  async #all() {
    const samples = await this.#resample([...this.#pieces], this.#rate);
    samples.set(this.#given);
    return samples;
  }
}

/** @param {Float32Array[]} pieces */
function lengthOf(pieces) {
  return pieces.reduce((sum, piece) => sum + piece.length, 0);
}

/** @param {Float32Array} samples at the rate of questions */
function fileOf(samples) {
  return new File([wavFile(samples, QUESTION_RATE)], "speech.wav", { type: "audio/wav" });
}

/** @type {Resample} */
async function resampled(pieces, rate) {
  const length = lengthOf(pieces);
  const context = new OfflineAudioContext(1, Math.ceil((length * QUESTION_RATE) / rate), QUESTION_RATE);
  const buffer = context.createBuffer(1, length, rate);
  let at = 0;
  for (const piece of pieces) {
    buffer.getChannelData(0).set(piece, at);
    at += piece.length;
  }
  const source = new AudioBufferSourceNode(context, { buffer });
  source.connect(context.destination);
  source.start();
  return (await context.startRendering()).getChannelData(0);
}
