// SPDX-License-Identifier: Apache-2.0
/** One reply, from the question to the last sample heard, or to the moment it is cut off. */

import { isAbort } from "./api.js";
import { heardText } from "./heard.js";
import { Pcm16Decoder } from "./sound.js";

/** How often what was heard is told while speech plays, in milliseconds. */
const TELL_MS = 100;

/**
 * What a reply is at this moment; seconds count from the question.
 * @typedef {object} Account
 * @property {string} text all that came
 * @property {string} heard its beginning that was heard; all of it where nothing is spoken
 * @property {number | null} heardSeconds of its speech; null where nothing is spoken
 * @property {number | null} firstText seconds to the first text
 * @property {number | null} firstAudio seconds to the first sound
 * @property {number} spoken seconds of speech that came
 * @property {number} gaps how often the speech ran dry
 */

export class Reply {
  #playback;
  #abort = new AbortController();
  #decoder = new Pcm16Decoder();
  #asked = performance.now();
  #text = "";
  #isComplete = false;
  /** Seconds heard at the stop. @type {number | null} */
  #stoppedAt = null;
  /** @type {number | null} */
  #firstText = null;
  /** @type {number | null} */
  #firstAudio = null;
  #tell;

  /**
   * @param {import("./player.js").Playback | null} playback where its speech goes; null = it is not spoken
   * @param {(account: Account) => void} tell called when it has changed
   */
  constructor(playback, tell) {
    this.#playback = playback;
    this.#tell = tell;
  }

  /** @type {Account} */
  get account() {
    return {
      text: this.#text,
      heard: this.#heard,
      heardSeconds: this.#heardSeconds,
      firstText: this.#firstText,
      firstAudio: this.#firstAudio,
      spoken: this.#spoken,
      gaps: this.#playback?.gaps ?? 0,
    };
  }

  /** Whether it was cut off. */
  get isStopped() {
    return this.#stoppedAt !== null;
  }

  get #heard() {
    const heard = this.#heardSeconds;
    return heard === null ? this.#text : heardText(this.#text, heard, this.#isComplete ? this.#spoken : null);
  }

  get #heardSeconds() {
    return this.#playback && (this.#stoppedAt ?? this.#playback.heard);
  }

  get #spoken() {
    return this.#playback?.seconds ?? 0;
  }

  /**
   * Ask, and follow the reply to its end or its stop.
   * @param {import("./api.js").Api} api
   * @param {object} body of the chat completion
   * @returns {Promise<string>} the text to keep: all of it, or what was heard until the stop
   * @throws {import("./api.js").ApiError}
   */
  async run(api, body) {
    const ticking = setInterval(() => this.#tell(this.account), TELL_MS);
    try {
      for await (const delta of api.chat(body, this.#abort.signal)) {
        this.#take(delta);
      }
      this.#isComplete = true;
      this.#playback?.complete();
      await this.#playback?.ended;
    } catch (error) {
      this.#playback?.stop();
      if (!this.isStopped || !isAbort(error)) {
        throw error;
      }
    } finally {
      clearInterval(ticking);
    }
    return this.isStopped ? this.#heard : this.#text;
  }

  /** Cut it off; `run` returns what was heard. */
  stop() {
    if (!this.isStopped) {
      this.#stoppedAt = this.#playback?.stop() ?? 0;
      this.#abort.abort();
    }
  }

  /** @param {import("./api.js").Delta} delta */
  #take(delta) {
    const text = delta.content ?? delta.audio?.transcript;
    if (text) {
      this.#text += text;
      this.#firstText ??= this.#seconds();
    }
    if (delta.audio?.data && this.#playback) {
      this.#firstAudio ??= this.#seconds();
      this.#playback.push(this.#decoder.feed(delta.audio.data));
    }
    if (text) {
      this.#tell(this.account);
    }
  }

  #seconds() {
    return (performance.now() - this.#asked) / 1000;
  }
}
