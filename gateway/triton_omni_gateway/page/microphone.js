// SPDX-License-Identifier: Apache-2.0
/** The microphone: samples while it is open, and recordings. */

import { Recording } from "./recording.js";

/** Kept from before a recording begins, in seconds: speech is noticed a little after it has begun. */
const BEFORE_S = 0.4;

export class Microphone {
  /** @type {{stream: MediaStream, context: AudioContext} | null} */
  #open = null;
  /** @type {Promise<void> | null} */
  #opening = null;
  /** What was heard just now. @type {Float32Array[]} */
  #before = [];
  /** @type {Recording | null} */
  #recording = null;
  #onPiece;

  /** @param {(piece: Float32Array, seconds: number) => void} onPiece told of every piece while it is open */
  constructor(onPiece) {
    this.#onPiece = onPiece;
  }

  /** Whether this page may ask for a microphone: browsers allow it over HTTPS and on this very machine. */
  static get isAllowed() {
    return window.isSecureContext && "mediaDevices" in navigator;
  }

  /**
   * Fulfilled once it is heard: some devices take half a second to begin, and what is said before is lost.
   * @throws {Error} there is none, or the user does not want it
   */
  async open() {
    this.#opening ??= this.#start().catch((error) => {
      this.#opening = null;
      throw new Error(`The microphone cannot be used: ${error.message || error.name}.`);
    });
    await this.#opening;
  }

  /** Let the microphone go, and the browser's sign of it. */
  close() {
    for (const track of this.#open?.stream.getTracks() ?? []) {
      track.stop();
    }
    this.#open?.context.close();
    this.#open = null;
    this.#opening = null;
    this.#before = [];
    this.#recording = null;
  }

  /** Begin a recording, with the moment before; the microphone is open. */
  record() {
    this.#recording = new Recording(this.#before, this.#open?.context.sampleRate ?? 0);
    return this.#recording;
  }

  /**
   * End the recording.
   * @returns {Promise<File | null>} null where nothing was recorded
   */
  async take() {
    const recording = this.#recording;
    this.#recording = null;
    this.#before = [];
    return recording?.end() ?? null;
  }

  async #start() {
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    const stream = await navigator.mediaDevices.getUserMedia({ audio });
    const context = new AudioContext();
    await Promise.all([context.audioWorklet.addModule(new URL("tap.js", import.meta.url)), context.resume()]);
    const tap = new AudioWorkletNode(context, "tap", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    this.#open = { stream, context };
    await new Promise((resolve) => {
      tap.port.onmessage = ({ data }) => {
        resolve(undefined);
        this.#take(data, context.sampleRate);
      };
      context.createMediaStreamSource(stream).connect(tap);
    });
  }

  /**
   * @param {Float32Array} piece
   * @param {number} rate
   */
  #take(piece, rate) {
    this.#recording?.push(piece);
    this.#before = [...this.#before, piece].slice(-Math.ceil((BEFORE_S * rate) / piece.length));
    this.#onPiece(piece, piece.length / rate);
  }
}
