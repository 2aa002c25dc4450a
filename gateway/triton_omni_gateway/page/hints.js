// SPDX-License-Identifier: Apache-2.0
/**
 * Sends a recording while it is still being spoken, for the server to compute it before the question is asked. Pure.
 *
 * The server takes sound in windows of two seconds. At the end of speech it has the rest alone to compute.
 */

import { ApiError } from "./api.js";
import { QUESTION_RATE } from "./sound.js";

/** Samples of a window, and those after it without which it is not complete. */
export const WINDOW = 2 * QUESTION_RATE;
export const REACH = QUESTION_RATE / 50;
/** Statuses of errors that cost one hint: no answer, no key yet, no room, no server, no time. */
const PASSING = [0, 401, 408, 429, 499, 503, 504];

/** @typedef {Pick<import("./recording.js").Recording, "length" | "beginning">} Spoken */

export class Hints {
  #send;
  /** @type {Spoken | null} */
  #recording = null;
  #windows = 0;
  #isBusy = false;
  #isRefused = false;

  /** @param {(sound: File) => Promise<void>} send sends what was spoken so far; rejected by an `ApiError` */
  constructor(send) {
    this.#send = send;
  }

  /**
   * To be called whenever a recording has grown. Sends its complete windows where there are new ones and no hint is
   * under way; a refusal ends all hints, since the gateway's server keeps no prompts.
   * @param {Spoken} recording
   */
  async follow(recording) {
    if (recording !== this.#recording) {
      this.#recording = recording;
      this.#windows = 0;
    }
    const windows = Math.floor((recording.length - REACH) / WINDOW);
    if (this.#isBusy || this.#isRefused || windows <= this.#windows) {
      return;
    }
    this.#windows = windows;
    this.#isBusy = true;
    try {
      const sound = await recording.beginning(windows * WINDOW + REACH);
      if (sound) {
        await this.#send(sound);
      }
    } catch (error) {
      if (!(error instanceof ApiError)) {
        throw error;
      }
      this.#isRefused = !PASSING.includes(error.status);
    } finally {
      this.#isBusy = false;
    }
  }
}
