// SPDX-License-Identifier: Apache-2.0
/** The microphone: samples at 16 kHz while it is open. */

/** A filter that leaves what 16 kHz can have: Butterworth of the sixth order, hertz and decibels. */
const HIGHEST_HZ = 6800;
const QUALITIES_DB = [-5.73, -3.01, 5.73];

export class Microphone {
  /** @type {{stream: MediaStream, context: AudioContext} | null} */
  #open = null;
  #take;

  /** @param {(piece: Float32Array) => void} take told of every piece while it is open */
  constructor(take) {
    this.#take = take;
  }

  /** True if this page may ask for a microphone: browsers allow it over HTTPS and on this very machine. */
  static get isAllowed() {
    return window.isSecureContext && "mediaDevices" in navigator;
  }

  /**
   * Fulfilled once it is heard: some devices take half a second to begin, and what is said before is lost.
   * @throws {Error} there is none, or the user does not want it
   */
  async open() {
    try {
      await this.#start();
    } catch (error) {
      this.close();
      const { message, name } = /** @type {Error} */ (error);
      throw new Error(`The microphone cannot be used: ${message || name}.`);
    }
  }

  /** Let the microphone go, and the browser's sign of it. */
  close() {
    for (const track of this.#open?.stream.getTracks() ?? []) {
      track.stop();
    }
    this.#open?.context.close();
    this.#open = null;
  }

  async #start() {
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    const stream = await navigator.mediaDevices.getUserMedia({ audio });
    const context = new AudioContext();
    this.#open = { stream, context };
    await Promise.all([context.audioWorklet.addModule(new URL("tap.js", import.meta.url)), context.resume()]);
    const tap = new AudioWorkletNode(context, "tap", {
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    await new Promise((resolve) => {
      tap.port.onmessage = ({ data }) => {
        resolve(undefined);
        this.#take(data);
      };
      QUALITIES_DB.map((Q) => new BiquadFilterNode(context, { type: "lowpass", frequency: HIGHEST_HZ, Q }))
        .reduce((from, to) => from.connect(to), /** @type {AudioNode} */ (context.createMediaStreamSource(stream)))
        .connect(tap);
    });
  }
}
