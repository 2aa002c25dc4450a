// SPDX-License-Identifier: Apache-2.0
/**
 * Whether a file of a kind that may hold pictures or sound alone (MP4, Matroska and WebM) holds pictures. The same rule
 * as in the Python client's `containers.py`.
 */

/** @typedef {[begin: number, end: number]} Span where something is in the file */

const MP4_TRACKS = ["moov", "trak", "mdia", "hdlr"];
/** Segment, Tracks, TrackEntry and TrackType of Matroska, each in the one before. */
const MATROSKA_TRACKS = [0x18538067, 0x1654ae6b, 0xae, 0x83];
const SOUND = new Set(["soun", 2]);
const PICTURES = new Set(["vide", 1]);

/**
 * Whether an MP4 or Matroska file has sound and no pictures; not where its tracks cannot be found.
 * @param {Uint8Array} data
 */
export function isSoundAlone(data) {
  const found = textAt(data, 4) === "ftyp" ? mp4Tracks(data) : matroskaTracks(data);
  return found.some((kind) => SOUND.has(kind)) && !found.some((kind) => PICTURES.has(kind));
}

/**
 * @param {Uint8Array} data
 * @returns {(string | number)[]}
 */
function mp4Tracks(data) {
  /** @type {Span[]} */
  let spans = [[0, data.length]];
  for (const name of MP4_TRACKS) {
    spans = spans.flatMap((span) => [...boxes(data, span, name)]);
  }
  return spans.map(([begin]) => textAt(data, begin + 8)); // a version and a word that is not used come first
}

/**
 * The contents of the boxes of this name that are directly in a span.
 * @param {Uint8Array} data
 * @param {Span} span
 * @param {string} wanted
 * @returns {Generator<Span>}
 */
function* boxes(data, [begin, end], wanted) {
  for (let at = begin; at + 8 <= end; ) {
    let size = numberAt(data, at, 4);
    const head = size === 1 ? 16 : 8;
    size = size === 1 ? numberAt(data, at + 8, 8) : size;
    const after = size ? Math.min(at + size, end) : end;
    if (after < at + head) {
      return;
    }
    if (textAt(data, at + 4) === wanted) {
      yield [at + head, after];
    }
    at = after;
  }
}

/**
 * @param {Uint8Array} data
 * @returns {(string | number)[]}
 */
function matroskaTracks(data) {
  /** @type {Span[]} */
  let spans = [[0, data.length]];
  for (const name of MATROSKA_TRACKS) {
    spans = spans.flatMap((span) => [...elements(data, span, name)]);
  }
  return spans.map(([begin, end]) => (end > begin ? data[end - 1] : 0));
}

/**
 * The contents of the elements of this name that are directly in a span.
 * @param {Uint8Array} data
 * @param {Span} span
 * @param {number} wanted
 * @returns {Generator<Span>}
 */
function* elements(data, [begin, end], wanted) {
  for (let at = begin; at < end; ) {
    const nameLength = lengthAt(data, at);
    const sizeLength = nameLength && lengthAt(data, at + nameLength);
    if (!sizeLength) {
      return;
    }
    const content = at + nameLength + sizeLength;
    // Its first bit tells the length; eight bytes with that bit would be more than a number holds exactly.
    const high = data[at + nameLength] - 2 ** (8 - sizeLength);
    const size = high * 256 ** (sizeLength - 1) + numberAt(data, at + nameLength + 1, sizeLength - 1);
    // All ones say that nobody knew it, as in a recording that was sent while it was made.
    const after = size >= 2 ** (7 * sizeLength) - 1 ? end : Math.min(content + size, end);
    if (numberAt(data, at, nameLength) === wanted) {
      yield [content, after];
    }
    at = after;
  }
}

/**
 * The bytes of the EBML number that begins here; 0 where there is none.
 * @param {Uint8Array} data
 * @param {number} at
 */
function lengthAt(data, at) {
  const length = Math.clz32(data[at] ?? 0) - 23;
  return length > 8 || at + length > data.length ? 0 : length;
}

/**
 * @param {Uint8Array} data
 * @param {number} at
 * @param {number} length
 */
function numberAt(data, at, length) {
  return data.subarray(at, at + length).reduce((number, byte) => number * 256 + byte, 0);
}

/**
 * Four characters.
 * @param {Uint8Array} data
 * @param {number} at
 */
function textAt(data, at) {
  return String.fromCharCode(...data.subarray(at, at + 4));
}
