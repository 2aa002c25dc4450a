// SPDX-License-Identifier: Apache-2.0
/** The connection to `/v1/realtime`: opened where it is needed, and not before. */

import { ApiError } from "./api.js";

/** Bytes that an event may have, and what the gateway calls so. */
const MOST_BYTES = 16 << 20;

/**
 * @typedef {object} Told
 * @property {(event: any) => void} event the session says something
 * @property {() => void} closed it is over, and none of its items is there any more
 */

export class Session {
  #api;
  #told;
  /** @type {WebSocket | null} */
  #socket = null;

  /**
   * @param {import("./api.js").Api} api
   * @param {Told} told
   */
  constructor(api, told) {
    this.#api = api;
    this.#told = told;
  }

  /**
   * Open it.
   * @returns {Promise<any>} its configuration
   * @throws {ApiError}
   */
  async open() {
    const socket = await this.#api.socket();
    return new Promise((resolve, reject) => {
      socket.onmessage = ({ data }) => {
        const { session } = JSON.parse(data); // session.created, the first event
        this.#socket = socket;
        socket.onmessage = (message) => this.#told.event(JSON.parse(message.data));
        socket.onclose = () => this.close();
        resolve(session);
      };
      socket.onclose = () => reject(new ApiError("The gateway takes no further conversation now.", 0));
    });
  }

  /**
   * @param {object} event
   * @throws {ApiError} it is longer than the gateway takes
   */
  send(event) {
    const text = JSON.stringify(event);
    if (text.length > MOST_BYTES) {
      const [size, most] = [text.length, MOST_BYTES].map((bytes) => (bytes / (1 << 20)).toFixed(1));
      throw new ApiError(`The message has ${size} MiB, and the gateway takes ${most}: attach less.`, 413);
    }
    this.#socket?.send(text);
  }

  /** End it. */
  close() {
    const socket = this.#socket;
    if (socket) {
      this.#socket = null;
      socket.onmessage = socket.onclose = null;
      socket.close();
      this.#told.closed();
    }
  }
}
