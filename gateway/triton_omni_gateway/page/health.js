// SPDX-License-Identifier: Apache-2.0
/** The server's readiness, asked for again and again while somebody looks at the page. */

const EVERY_MS = 5000;
/** While it takes none. */
const SOON_MS = 1000;

export class Health {
  #api;
  #tell;
  #timer = 0;
  /** True if it took requests when it was last asked. */
  isReady = true;

  /**
   * @param {import("./api.js").Api} api
   * @param {() => void} tell called after each answer
   */
  constructor(api, tell) {
    this.#api = api;
    this.#tell = tell;
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
  }

  /** Ask now, and again from now on. */
  async look() {
    this.isReady = await this.#api.isReady();
    clearTimeout(this.#timer);
    if (!document.hidden) {
      this.#timer = setTimeout(() => this.look(), this.isReady ? EVERY_MS : SOON_MS);
    }
    this.#tell();
  }
}
