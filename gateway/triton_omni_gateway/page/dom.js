// SPDX-License-Identifier: Apache-2.0
/** Elements of the page. */

const SVG = "http://www.w3.org/2000/svg";

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
 * A drawing of 24 by 24 units, hidden from screen readers.
 * @param {string} path
 */
export function icon(path) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  drawing.append(line);
  return drawing;
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
