// SPDX-License-Identifier: Apache-2.0
/** When somebody begins and ends to speak, by loudness over the room's own. Pure. */

/** How many times louder than the room speech is. */
const OVER_ROOM = 3;
/** Quieter than this is never speech: root mean square of full scale. */
const QUIETEST = 0.012;
/** Seconds in which the measure of the room follows what is heard, down and up. */
const ROOM_FALLS_S = 0.3;
const ROOM_RISES_S = 8;
/** Seconds of loudness that make it speech, and of quiet that end it. */
const BEGINS_S = 0.12;
const ENDS_S = 0.9;

export class SpeechGate {
  #room = QUIETEST / OVER_ROOM;
  #loud = 0;
  #quiet = 0;
  #open = false;

  /**
   * What the next stretch of sound changes.
   * @param {number} level its root mean square
   * @param {number} seconds its length
   * @returns {"begin" | "end" | null}
   */
  feed(level, seconds) {
    const isLoud = level > Math.max(QUIETEST, this.#room * OVER_ROOM);
    const follow = level < this.#room ? ROOM_FALLS_S : ROOM_RISES_S;
    this.#room += (level - this.#room) * Math.min(1, seconds / follow);
    this.#loud = isLoud ? this.#loud + seconds : 0;
    this.#quiet = isLoud ? 0 : this.#quiet + seconds;
    if (!this.#open && this.#loud >= BEGINS_S) {
      this.#open = true;
      return "begin";
    }
    if (this.#open && this.#quiet >= ENDS_S) {
      this.#open = false;
      return "end";
    }
    return null;
  }
}
