// SPDX-License-Identifier: Apache-2.0
/** One reply, from the question to the last sample heard, or to the moment it is cut off. */

import { Pcm16Decoder, REPLY_RATE, wavFile } from "./sound.js";

/**
 * Seconds count from the question.
 * @typedef {object} Times
 * @property {number | null} firstText seconds to the first text
 * @property {number | null} firstAudio seconds to the first sound
 * @property {number} spoken seconds of speech that came
 * @property {number} gaps how often the speech ran dry
 */

export class Reply {
  #playback;
  #asked;
  #decoder = new Pcm16Decoder();
  /** @type {Float32Array[]} */
  #pieces = [];
  /** The item that it is of the conversation; empty before anything came. */
  itemId = "";
  text = "";
  isStopped = false;
  /** True once nothing more comes. */
  isComplete = false;
  /** @type {number | null} */
  #firstText = null;
  /** @type {number | null} */
  #firstAudio = null;

  /**
   * @param {string} responseId
   * @param {import("./player.js").Playback | null} playback where its speech goes; null = it is not spoken
   * @param {number} asked when the question was complete, by `performance.now()`
   */
  constructor(responseId, playback, asked) {
    this.responseId = responseId;
    this.#playback = playback;
    this.#asked = asked;
  }

  /** True once it is heard. */
  get isHeard() {
    return this.#firstAudio !== null;
  }

  /** Loudness of what is heard now. */
  get level() {
    return this.#playback?.level ?? 0;
  }

  /** @type {Times} */
  get times() {
    const { gaps = 0, seconds: spoken = 0 } = this.#playback ?? {};
    return { firstText: this.#firstText, firstAudio: this.#firstAudio, spoken, gaps };
  }

  /** Its speech as a WAV file; null where there is none. */
  get file() {
    return this.#pieces.length ? new Blob([wavFile(this.#pieces, REPLY_RATE)], { type: "audio/wav" }) : null;
  }

  /** @param {string} text comes next */
  write(text) {
    this.text += text;
    this.#firstText ??= this.#seconds();
  }

  /** @param {string} sound comes next: PCM16 in base64 */
  speak(sound) {
    const samples = this.#decoder.feed(sound);
    this.#firstAudio ??= this.#seconds();
    this.#pieces.push(samples);
    this.#playback?.push(samples);
  }

  /** Nothing more comes. Fulfilled when all of it was heard, or it was stopped. */
  async complete() {
    this.isComplete = true;
    this.#playback?.complete();
    await this.#playback?.ended;
  }

  /**
   * Fall silent at once.
   * @returns {number | null} the seconds of its speech that were heard; null where it is not spoken
   */
  stop() {
    this.isStopped = true;
    return this.#playback?.stop() ?? null;
  }

  #seconds() {
    return (performance.now() - this.#asked) / 1000;
  }
}
