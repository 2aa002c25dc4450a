// SPDX-License-Identifier: Apache-2.0
/**
 * How much of a reply's text was heard when its speech was cut off: the rule of the Python client's `heard_text`.
 *
 * Text comes far ahead of speech and with no alignment between them, so this is an estimate: speech runs through the
 * text evenly, at the reply's own pace where its whole length is known, else at that of ordinary speech. Pure.
 */

/** Letters a second of ordinary speech (English: 150 words a minute of 6 letters, space included). */
const UNITS_A_SECOND = 15;
/** A character of Chinese, Japanese or Korean is a syllable: about five are spoken a second. */
const WIDE_UNITS = 3;
/** East Asian wide and full-width characters (Unicode's W and F), emoji among them. */
const WIDE = new RegExp(
  "[\\u1100-\\u115f\\u2329\\u232a\\u2e80-\\u303e\\u3041-\\u3247\\u3250-\\u4dbf\\u4e00-\\ua4cf\\ua960-\\ua97c\\uac00-\\ud7a3" +
    "\\uf900-\\ufaff\\ufe10-\\ufe19\\ufe30-\\ufe6b\\uff01-\\uff60\\uffe0-\\uffe6" +
    "\\u{16fe0}-\\u{1b2fb}\\u{1f200}-\\u{1f265}\\u{20000}-\\u{3fffd}]" +
    "|(?![\\u{1f1e6}-\\u{1f1ff}])\\p{Emoji_Presentation}",
  "u",
);

/**
 * The beginning of `text` that was spoken in `heard` seconds, up to the end of a word.
 * @param {string} text of the reply, as far as it has come
 * @param {number} heard seconds of its speech that reached the listener
 * @param {number | null} [total] seconds of its whole speech; null where not all of it has come
 * @returns {string}
 */
export function heardText(text, heard, total = null) {
  if (total !== null && heard >= total) {
    return text;
  }
  const characters = Array.from(text);
  const sizes = characters.map((character) => (WIDE.test(character) ? WIDE_UNITS : 1));
  const whole = sizes.reduce((sum, size) => sum + size, 0);
  const reach = total === null ? heard * UNITS_A_SECOND : (heard / total) * whole;
  return wholeWords(characters, reached(sizes, reach));
}

/**
 * How many characters of these sizes fit into `units`.
 * @param {number[]} sizes
 * @param {number} units
 */
function reached(sizes, units) {
  let used = 0;
  const first = sizes.findIndex((size) => {
    used += size;
    return used > units;
  });
  return first < 0 ? sizes.length : first;
}

/**
 * The first `end` characters without a word that is cut in two.
 * @param {string[]} characters
 * @param {number} end
 */
function wholeWords(characters, end) {
  const breaks = (/** @type {number} */ at) => /\s/u.test(characters[at]) || WIDE.test(characters[at]);
  let last = end;
  if (end > 0 && end < characters.length && !breaks(end - 1) && !breaks(end)) {
    while (last > 0 && !breaks(last - 1)) {
      last -= 1;
    }
  }
  return characters.slice(0, last).join("").trimEnd();
}
