// SPDX-License-Identifier: Apache-2.0
/** A reply's speech through Web Audio: every chunk begins at the very sample where the one before ends. */

import { loudness, REPLY_RATE } from "./sound.js";
import { Timeline } from "./timeline.js";

/** Seconds from the first chunk to its sound: scheduled for this very moment, its beginning would be lost. */
const LEAD_S = 0.03;
/** Time constant of the fade at a stop, in seconds; cut at once, speech clicks. */
const FADE_S = 0.015;
/** Samples of a moment whose loudness is told. */
const METERED = 1024;

/** The page's output; made at the first gesture, since browsers let no page sound before one. */
export class Player {
  /** @type {AudioContext | null} */
  #context = null;

  /** To be called within a user's gesture. */
  unlock() {
    this.#context ??= new AudioContext({ sampleRate: REPLY_RATE, latencyHint: "interactive" });
    if (this.#context.state !== "running") {
      this.#context.resume().catch(() => undefined); // stays silent until a gesture that the browser accepts
    }
  }

  /** A reply that is about to be spoken. */
  begin() {
    this.unlock();
    return new Playback(/** @type {AudioContext} */ (this.#context));
  }
}

/** One reply's speech. */
export class Playback {
  #context;
  #gain;
  #meter;
  #moment;
  #timeline = new Timeline(REPLY_RATE, LEAD_S);
  /** @type {Set<AudioBufferSourceNode>} */
  #waiting = new Set();
  #isComplete = false;
  #isOver = false;
  /** @type {() => void} */
  #resolve = () => undefined;
  /** Fulfilled when all of it was played, or it was stopped. @type {Promise<void>} */
  ended = new Promise((resolve) => {
    this.#resolve = resolve;
  });

  /** @param {BaseAudioContext} context of 24 kHz */
  constructor(context) {
    this.#context = context;
    this.#gain = context.createGain();
    this.#meter = new AnalyserNode(context, { fftSize: METERED });
    this.#moment = new Float32Array(METERED);
    this.#gain.connect(this.#meter).connect(context.destination);
  }

  /** Number of times that the speech ran dry. */
  get gaps() {
    return this.#timeline.gaps;
  }

  /** Loudness of this moment: root mean square of full scale. */
  get level() {
    this.#meter.getFloatTimeDomainData(this.#moment);
    return loudness(this.#moment);
  }

  /** Seconds of speech that have come. */
  get seconds() {
    return this.#timeline.length / REPLY_RATE;
  }

  /** Seconds of speech that have left the loudspeaker. */
  get heard() {
    return this.#timeline.heard(this.#context.currentTime - this.#latency);
  }

  get #latency() {
    const context = this.#context;
    return context instanceof AudioContext ? context.outputLatency || context.baseLatency || 0 : 0;
  }

  /**
   * Play these samples after all others.
   * @param {Float32Array<ArrayBuffer>} samples at 24 kHz
   */
  push(samples) {
    if (this.#isOver || samples.length === 0) {
      return;
    }
    const buffer = this.#context.createBuffer(1, samples.length, REPLY_RATE);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#gain);
    source.start(this.#timeline.place(this.#context.currentTime, samples.length) / REPLY_RATE);
    this.#waiting.add(source);
    source.onended = () => {
      this.#waiting.delete(source);
      this.#settle();
    };
  }

  /** Nothing more will come. */
  complete() {
    this.#isComplete = true;
    this.#settle();
  }

  /**
   * Fall silent at once.
   * @returns {number} the seconds that were heard
   */
  stop() {
    const { heard } = this;
    this.#isOver = this.#isComplete = true;
    this.#gain.gain.setTargetAtTime(0, this.#context.currentTime, FADE_S);
    for (const source of this.#waiting) {
      source.stop(this.#context.currentTime + 5 * FADE_S);
    }
    this.#resolve();
    return heard;
  }

  #settle() {
    if (this.#isComplete && this.#waiting.size === 0) {
      this.#isOver = true;
      this.#gain.disconnect();
      this.#resolve();
    }
  }
}
