// SPDX-License-Identifier: Apache-2.0
/** Samples to bytes and back: PCM16 in base64, as sessions send and take it, and WAV files. Pure. */

/** Samples a second of every reply. */
export const REPLY_RATE = 24000;
/** Samples a second of what the model hears. */
export const SPEECH_RATE = 16000;
const PEAK = 32767;
const HEADER_BYTES = 44;
/** Arguments that a call may have everywhere. */
const AT_ONCE = 8192;

/** Little-endian PCM16 in base64, cut anywhere, to samples in [-1, 1]; a sample cut in two waits for its other half. */
export class Pcm16Decoder {
  #rest = "";

  /**
   * @param {string} base64
   * @returns {Float32Array<ArrayBuffer>}
   */
  feed(base64) {
    const bytes = this.#rest + atob(base64);
    const samples = new Float32Array(bytes.length >> 1);
    for (let at = 0; at < samples.length; at += 1) {
      const unsigned = bytes.charCodeAt(2 * at) | (bytes.charCodeAt(2 * at + 1) << 8);
      samples[at] = Math.max(((unsigned << 16) >> 16) / PEAK, -1);
    }
    this.#rest = bytes.slice(2 * samples.length);
    return samples;
  }
}

/**
 * Little-endian PCM16 in base64.
 * @param {Float32Array} samples in [-1, 1]; what is beyond is clipped
 */
export function pcm16(samples) {
  const bytes = new Uint8Array(2 * samples.length);
  write(new DataView(bytes.buffer), 0, samples);
  let text = "";
  for (let at = 0; at < bytes.length; at += AT_ONCE) {
    text += String.fromCharCode(...bytes.subarray(at, at + AT_ONCE));
  }
  return btoa(text);
}

/**
 * A complete WAV file: PCM16, mono.
 * @param {Float32Array[]} pieces of samples in [-1, 1]; what is beyond is clipped
 * @param {number} rate samples a second
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function wavFile(pieces, rate) {
  const length = 2 * pieces.reduce((sum, piece) => sum + piece.length, 0);
  const bytes = new Uint8Array(HEADER_BYTES + length);
  const view = new DataView(bytes.buffer);
  const name = (/** @type {number} */ at, /** @type {string} */ text) => bytes.set(new TextEncoder().encode(text), at);
  name(0, "RIFF");
  view.setUint32(4, bytes.length - 8, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  name(36, "data");
  view.setUint32(40, length, true);
  let at = HEADER_BYTES;
  for (const piece of pieces) {
    write(view, at, piece);
    at += 2 * piece.length;
  }
  return bytes;
}

/**
 * Root mean square of samples, 0 for none.
 * @param {Float32Array} samples
 */
export function loudness(samples) {
  const energy = samples.reduce((sum, sample) => sum + sample * sample, 0);
  return samples.length ? Math.sqrt(energy / samples.length) : 0;
}

/**
 * @param {DataView} view
 * @param {number} begin its byte where the samples begin
 * @param {Float32Array} samples
 */
function write(view, begin, samples) {
  samples.forEach((sample, at) => {
    view.setInt16(begin + 2 * at, Math.round(Math.max(-1, Math.min(1, sample)) * PEAK), true);
  });
}
