// SPDX-License-Identifier: Apache-2.0
/** Samples to bytes and back: PCM16 in base64 as replies bring it, WAV files as questions take it. Pure. */

/** Samples a second of every reply. */
export const REPLY_RATE = 24000;
/** Samples a second of what the model hears. */
export const QUESTION_RATE = 16000;
const PEAK = 32767;
const HEADER_BYTES = 44;

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
 * A complete WAV file: PCM16, mono.
 * @param {Float32Array} samples in [-1, 1]; what is beyond is clipped
 * @param {number} rate samples a second
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function wavFile(samples, rate) {
  const bytes = new Uint8Array(HEADER_BYTES + 2 * samples.length);
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
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, at) => {
    view.setInt16(HEADER_BYTES + 2 * at, Math.round(Math.max(-1, Math.min(1, sample)) * PEAK), true);
  });
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
