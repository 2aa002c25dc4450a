// SPDX-License-Identifier: Apache-2.0
/** The gateway's public API, as any caller has it. */

/** @typedef {{model: string, voices: string[]}} Offer */

/** A refusal or a failure, in the server's own words where it gave any. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status HTTP status; 0 where no answer came
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** True if the gateway wants an API key, or another one. */
  get needsKey() {
    return this.status === 401;
  }

  /** True if the gateway refuses what it is asked, ready or not. */
  get isRefusal() {
    return this.status >= 400 && this.status < 500;
  }
}

export class Api {
  #key;

  /** @param {() => string} key what is sent as the API key; empty for none */
  constructor(key) {
    this.#key = key;
  }

  /**
   * The model and the voices to choose from.
   * @returns {Promise<Offer>}
   * @throws {ApiError}
   */
  async offer() {
    const [first] = (await this.#fetch("v1/models", {})).data;
    return { model: first.id, voices: first.voices ?? [] };
  }

  /** True if the gateway can be reached and has a server that takes requests. */
  async isReady() {
    const answer = await fetch(new URL("health/ready", document.baseURI)).catch(() => null);
    return answer?.ok ?? false;
  }

  /**
   * A socket that will be a session. Its secret stands for the key, which a page cannot send with it.
   * @throws {ApiError}
   */
  async socket() {
    const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" };
    const { value } = await this.#fetch("v1/realtime/client_secrets", init);
    const url = new URL("v1/realtime", document.baseURI.replace(/^http/, "ws"));
    return new WebSocket(url, ["realtime", `openai-insecure-api-key.${value}`]);
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
    return answer.json().catch(unreachable);
  }
}

/**
 * The bytes of a text as a header may hold them: one character a byte.
 * @param {string} text
 */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** @returns {never} */
function unreachable() {
  throw new ApiError("The gateway cannot be reached.", 0);
}

/** @param {Response} answer */
async function refusalOf(answer) {
  const said = (await answer.json().catch(() => null))?.error;
  return new ApiError(said?.message ?? `The gateway answered with status ${answer.status}.`, answer.status);
}
