// SPDX-License-Identifier: Apache-2.0
/** The conversation as a session is told it anew after its connection broke: speech in its words. Pure. */

/** @typedef {{id: string, role: "user" | "assistant", content: import("./media.js").Part[]}} Item */

export class Conversation {
  /** @type {Map<string, Item>} */
  #items = new Map();

  /** The items that a new session is told: all that have words or media. */
  get items() {
    return [...this.#items.values()].filter(({ content }) => content.length > 0);
  }

  /**
   * Add an item, or set what it says.
   * @param {string} id
   * @param {Item["role"]} role
   * @param {Item["content"]} content
   */
  keep(id, role, content) {
    this.#items.set(id, { id, role, content });
  }

  /**
   * Add a spoken item, or set its words.
   * @param {string} id
   * @param {Item["role"]} role
   * @param {string} words
   */
  keepWords(id, role, words) {
    const type = role === "user" ? /** @type {const} */ ("input_text") : /** @type {const} */ ("output_text");
    this.keep(id, role, words ? [{ type, text: words }] : []);
  }

  /** @param {string} id */
  remove(id) {
    this.#items.delete(id);
  }
}

/** A new id for an item. */
export function newId() {
  return `item_${Array.from(crypto.getRandomValues(new Uint32Array(3)), (number) => number.toString(16)).join("")}`;
}
