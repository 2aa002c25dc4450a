// SPDX-License-Identifier: Apache-2.0
/** Server-sent events, cut anywhere, to the data of each. Pure. */

export class EventParser {
  #rest = "";
  /** @type {string[]} */
  #lines = [];

  /**
   * The data of the events that `text` completes; lines end with LF or CRLF, comments and other fields are skipped.
   * @param {string} text
   * @returns {string[]}
   */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop() ?? "";
    return lines.flatMap((line) => this.#take(line.replace(/\r$/, "")));
  }

  /** @param {string} line */
  #take(line) {
    if (line.startsWith("data:")) {
      this.#lines.push(line.slice(5).replace(/^ /, ""));
    }
    if (line !== "" || this.#lines.length === 0) {
      return [];
    }
    const event = this.#lines.join("\n");
    this.#lines = [];
    return [event];
  }
}
