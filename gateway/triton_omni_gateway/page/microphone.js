// SPDX-License-Identifier: Apache-2.0
/** The microphone: samples at 16 kHz while it is open. */

/** A filter that leaves what 16 kHz can have: Butterworth of the sixth order, hertz and decibels. */
const HIGHEST_HZ = 6800;
const QUALITIES_DB = [-5.73, -3.01, 5.73];
const CURE = "allow it for this page or plug one in, and press Talk again.";

/**
 * @typedef {object} Told nothing after it was closed
 * @property {(piece: Float32Array) => void} hear samples at 16 kHz
 * @property {(message: string) => void} fail it cannot be opened, or has left
 */

/** Opened once and closed once: closed while it opens, it lets go of all that it is given later. */
export class Microphone {
  #told;
  #isClosed = false;
  /** @type {MediaStreamTrack[]} */
  #tracks = [];
  /** @type {AudioContext | null} */
  #context = null;

  /** @param {Told} told */
  constructor(told) {
    this.#told = told;
  }

  /** True if this page may ask for a microphone: browsers allow it over HTTPS and on this very machine. */
  static get isAllowed() {
    return window.isSecureContext && "mediaDevices" in navigator;
  }

  /** Ask for it; some devices take half a second to begin, and what is said before is lost. */
  async open() {
    try {
      await this.#start();
    } catch (error) {
      const { message, name } = /** @type {Error} */ (error);
      this.#fail(`The microphone cannot be used (${message || name}): ${CURE}`);
    }
  }

  /** Let the microphone go, and the browser's sign of it. */
  close() {
    this.#isClosed = true;
    for (const track of this.#tracks) {
      track.stop();
    }
    this.#context?.close();
    this.#context = null;
  }

  async #start() {
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    const stream = await navigator.mediaDevices.getUserMedia({ audio });
    this.#tracks = stream.getTracks();
    if (this.#isClosed) {
      this.close();
      return;
    }
    for (const track of this.#tracks) {
      track.addEventListener("ended", () => this.#fail(`The microphone has stopped: ${CURE}`));
    }
    const context = new AudioContext();
    this.#context = context;
    await Promise.all([context.audioWorklet.addModule(new URL("tap.js", import.meta.url)), context.resume()]);
    const tap = new AudioWorkletNode(context, "tap", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    tap.port.onmessage = ({ data }) => this.#isClosed || this.#told.hear(data);
    QUALITIES_DB.map((Q) => new BiquadFilterNode(context, { type: "lowpass", frequency: HIGHEST_HZ, Q }))
      .reduce((from, to) => from.connect(to), /** @type {AudioNode} */ (context.createMediaStreamSource(stream)))
      .connect(tap);
  }

  /** @param {string} message */
  #fail(message) {
    if (!this.#isClosed) {
      this.#told.fail(message);
    }
  }
}
