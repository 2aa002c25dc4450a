// SPDX-License-Identifier: Apache-2.0
/** Elements of the page. */

/**
 * A new element.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Partial<HTMLElementTagNameMap[Name]>} properties
 * @param {Node[]} children
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/**
 * The page's element of this id.
 * @template {HTMLElement} Kind
 * @param {string} id
 * @param {new () => Kind} kind its class
 * @returns {Kind}
 */
export function byId(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) {
    throw new TypeError(`the page has no ${kind.name} #${id}`);
  }
  return found;
}

/**
 * A medium as it is seen.
 * @param {import("./media.js").Medium} medium
 * @param {boolean} hasControls whether it can be played
 */
export function preview({ kind, name, url }, hasControls) {
  if (kind === "image") {
    return element("img", { src: url, alt: name });
  }
  return element(kind, { src: url, controls: hasControls, preload: "metadata", ariaLabel: name });
}
