// SPDX-License-Identifier: Apache-2.0
/** The text of a reply as it is read: Markdown, in which HTML is text like any other and pictures are not fetched. */

/** A character that no text has. */
const CUT = "\ufdd0";
/** The page's own headings come first. */
const UNDER = 2;
const LOWEST = 6;

const parser = markdownit({ html: false, breaks: true }).disable(["image"]);
parser.core.ruler.push("page", ({ tokens }) => {
  for (const token of tokens.filter(({ type }) => type.startsWith("heading_"))) {
    token.tag = `h${Math.min(LOWEST, Number(token.tag[1]) + UNDER)}`;
  }
});

/**
 * @param {string} text
 * @param {number} [heard] characters of it that were heard; the rest stands back
 * @returns {Node[]}
 */
export function rendered(text, heard = text.length) {
  const marked = heard < text.length ? text.slice(0, heard) + CUT + text.slice(heard) : text;
  const { body } = new DOMParser().parseFromString(parser.render(marked), "text/html");
  for (const link of body.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  }
  if (heard < text.length) {
    setBack(body);
  }
  return [...body.childNodes];
}

/**
 * Set what follows the cut back.
 * @param {HTMLElement} body
 */
function setBack(body) {
  const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    texts.push(/** @type {Text} */ (walker.currentNode));
  }
  const first = texts.findIndex(({ data }) => data.includes(CUT));
  if (first < 0) {
    return;
  }
  const at = texts[first].data.indexOf(CUT);
  texts[first].deleteData(at, CUT.length);
  const words = [texts[first].splitText(at), ...texts.slice(first + 1)].filter(({ data }) => data.trim());
  for (const text of words) {
    const unheard = document.createElement("span");
    unheard.className = "unheard";
    text.replaceWith(unheard);
    unheard.append(text);
  }
}
