// SPDX-License-Identifier: Apache-2.0
/** The turns so far: media included, and of a reply that was cut off only what was heard. Pure. */

/**
 * A part of a message, as the gateway's chat completions take it.
 * @typedef {{type: "text", text: string}
 *   | {type: "image_url", image_url: {url: string}}
 *   | {type: "input_audio", input_audio: {data: string, format: string}}
 *   | {type: "audio_url", audio_url: {url: string}}
 *   | {type: "video_url", video_url: {url: string}}} Part
 * @typedef {{role: "user" | "assistant", content: string | Part[]}} Message
 */

export class Conversation {
  /** @type {{content: Part[], reply: string}[]} */
  #turns = [];
  #cacheKey = drawn();
  /** Whether its sounds are taken in pieces: from its first recording on, so that the server knows them again. */
  inPieces = false;

  /** Under what its turns share the server's caches, with each other and nobody else. */
  get cacheKey() {
    return this.#cacheKey;
  }

  /** Whether nothing was said yet. */
  get isEmpty() {
    return this.#turns.length === 0;
  }

  /**
   * All messages of a request whose question is `content`.
   * @param {Part[]} content
   * @returns {Message[]}
   */
  asking(content) {
    return [...this.#turns.flatMap(messagesOf), { role: "user", content }];
  }

  /**
   * Keep a turn that is over; one whose reply failed is not kept at all.
   * @param {Part[]} content what the user said and showed
   * @param {string} reply what was heard of the reply; empty when nothing was
   */
  keep(content, reply) {
    this.#turns.push({ content, reply });
  }

  /** Forget every turn. */
  reset() {
    this.#turns = [];
    this.#cacheKey = drawn();
    this.inPieces = false;
  }
}

function drawn() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), String).join("-");
}

/**
 * @param {{content: Part[], reply: string}} turn
 * @returns {Message[]}
 */
function messagesOf({ content, reply }) {
  /** @type {Message[]} */
  const said = [{ role: "user", content }];
  return reply ? [...said, { role: "assistant", content: reply }] : said;
}
