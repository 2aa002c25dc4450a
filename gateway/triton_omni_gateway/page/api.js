// SPDX-License-Identifier: Apache-2.0
/** The gateway's public API, as any caller has it. */

import { EventParser } from "./sse.js";

/**
 * @typedef {{model: string, voices: string[]}} Offer
 * @typedef {{audio?: {transcript?: string, data?: string} | null, content?: string | null}} Delta
 */

const JSON_BODY = { "Content-Type": "application/json" };

/** A refusal or a failure, in the server's own words where it gave any. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status HTTP status; 0 where no answer came
   * @param {string | null} param the key of the request that is at fault, where a single one is
   */
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }

  /** Whether the gateway wants an API key, or another one. */
  get needsKey() {
    return this.status === 401;
  }
}

export class Api {
  #key;

  /** @param {() => string} key what is sent as the API key; empty for none */
  constructor(key) {
    this.#key = key;
  }

  /**
   * What there is to choose from.
   * @returns {Promise<Offer>}
   * @throws {ApiError}
   */
  async offer() {
    const answer = await this.#fetch("v1/models", {});
    const [first] = (await answer.json()).data;
    return { model: first.id, voices: first.voices ?? [] };
  }

  /** Whether the gateway can be reached and a server behind it takes requests. */
  async isReady() {
    const answer = await fetch(new URL("health/ready", document.baseURI)).catch(() => null);
    return answer?.ok ?? false;
  }

  /**
   * A streamed reply, delta by delta.
   * @param {object} body of the chat completion
   * @param {AbortSignal} signal aborting it leaves the gateway, which cancels the request on the server
   * @returns {AsyncGenerator<Delta, void>}
   * @throws {ApiError}
   */
  async *chat(body, signal) {
    const init = { method: "POST", headers: JSON_BODY, body: JSON.stringify({ ...body, stream: true }), signal };
    const answer = await this.#fetch("v1/chat/completions", init);
    for await (const event of events(answer)) {
      if (event === "[DONE]") {
        return;
      }
      const { error, choices } = JSON.parse(event);
      if (error) {
        throw new ApiError(error.message, answer.status, error.param);
      }
      if (choices?.length) {
        yield choices[0].delta;
      }
    }
    throw new ApiError("The connection was closed before the reply was complete.", 0);
  }

  /**
   * Have the server compute a prompt before it is asked; waiting replies go first.
   * @param {object} body of the chat completion that will follow
   * @throws {ApiError}
   */
  async prefill(body) {
    const hint = JSON.stringify({ ...body, prefill_only: true, priority: 1 });
    const answer = await this.#fetch("v1/chat/completions", { method: "POST", headers: JSON_BODY, body: hint });
    await answer.arrayBuffer().catch(unreachable); // frees the connection
  }

  /**
   * @param {string} path below the page's own address
   * @param {RequestInit} init
   */
  async #fetch(path, init) {
    const key = this.#key();
    const headers = { ...init.headers, ...(key ? { Authorization: `Bearer ${utf8(key)}` } : {}) };
    const answer = await fetch(new URL(path, document.baseURI), { ...init, headers }).catch(unreachable);
    if (!answer.ok) {
      throw await refusalOf(answer);
    }
    return answer;
  }
}

/**
 * The bytes of a text as a header may hold them: one character a byte.
 * @param {string} text
 */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/**
 * @param {unknown} error
 * @returns {never}
 */
function unreachable(error) {
  if (isAbort(error)) {
    throw error;
  }
  throw new ApiError("The gateway cannot be reached.", 0);
}

/** @param {unknown} error */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/** @param {Response} answer */
async function refusalOf(answer) {
  const said = (await answer.json().catch(() => null))?.error;
  const message = said?.message ?? `The gateway answered with status ${answer.status}.`;
  return new ApiError(message, answer.status, said?.param);
}

/** @param {Response} answer */
async function* events(answer) {
  const parser = new EventParser();
  const texts = /** @type {ReadableStream<Uint8Array<ArrayBuffer>>} */ (answer.body).pipeThrough(
    new TextDecoderStream(),
  );
  const reader = texts.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      yield* parser.feed(read.value);
    }
  } catch (error) {
    unreachable(error);
  }
}
