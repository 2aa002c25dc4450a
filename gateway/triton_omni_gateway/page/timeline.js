// SPDX-License-Identifier: Apache-2.0
/** When each chunk of a reply's speech plays, in whole samples, so that no rounding opens a gap. Pure. */

export class Timeline {
  #rate;
  #lead;
  /** Stretches without a gap: first sample and length. @type {{start: number, length: number}[]} */
  #stretches = [];

  /**
   * @param {number} rate samples a second
   * @param {number} lead seconds between placing a chunk and its sound, where nothing plays that it could follow
   */
  constructor(rate, lead) {
    this.#rate = rate;
    this.#lead = lead;
  }

  /** Number of times that the speech ran dry and went on later. */
  get gaps() {
    return Math.max(0, this.#stretches.length - 1);
  }

  /** Samples placed so far. */
  get length() {
    return this.#stretches.reduce((sum, { length }) => sum + length, 0);
  }

  /**
   * The place of the next chunk: right after the one before, or soon where that has ended.
   * @param {number} now seconds on the clock that plays
   * @param {number} length samples of the chunk
   * @returns {number} its first sample, counted from that clock's 0
   */
  place(now, length) {
    const last = this.#stretches.at(-1);
    const current = Math.ceil(now * this.#rate);
    if (last && last.start + last.length >= current) {
      last.length += length;
      return last.start + last.length - length;
    }
    const start = current + Math.round(this.#lead * this.#rate);
    this.#stretches.push({ start, length });
    return start;
  }

  /**
   * Seconds of speech that were played up to `now`, the gaps left out.
   * @param {number} now seconds on the clock that plays
   */
  heard(now) {
    const played = (/** @type {{start: number, length: number}} */ { start, length }) =>
      Math.min(Math.max(now * this.#rate - start, 0), length);
    return this.#stretches.reduce((sum, stretch) => sum + played(stretch), 0) / this.#rate;
  }
}
