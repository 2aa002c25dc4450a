// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { Recording } from "../../gateway/triton_omni_gateway/page/recording.js";

const RATE = 48000;
const PIECE = new Float32Array(480).fill(0.5);

/**
 * A resampler whose every call gives other samples, as one gives that looks far ahead.
 * @returns {import("../../gateway/triton_omni_gateway/page/recording.js").Resample}
 */
function restless() {
  let calls = 0;
  return async (pieces, rate) => {
    calls += 1;
    const samples = pieces.reduce((sum, piece) => sum + piece.length, 0);
    return new Float32Array((samples * 16000) / rate).fill(calls / 100);
  };
}

/** @param {File | null} file a WAV file @returns {Promise<Int16Array>} */
const samplesOf = async (file) => new Int16Array(await /** @type {File} */ (file).arrayBuffer(), 44);

test("its length leaves out what a resampler may still change", () => {
  const recording = new Recording([PIECE, PIECE], RATE);
  assert.equal(recording.length, 160);
  recording.push(PIECE);
  assert.equal(recording.length, 320);
  assert.equal(new Recording([], RATE).length, 0);
});

test("what was given stays the beginning of all that follows", async () => {
  const recording = new Recording([PIECE], RATE, restless());
  const given = [];
  for (const pieces of [2, 3, 4]) {
    recording.push(PIECE);
    given.push(await samplesOf(await recording.beginning(100 * pieces)));
  }
  const whole = await samplesOf(await recording.end());
  assert.equal(whole.length, 4 * 160);
  for (const [at, before] of given.entries()) {
    assert.equal(before.length, 100 * (at + 2));
    assert.deepEqual(before, whole.slice(0, before.length));
  }
  assert.equal(new Set(whole).size, 4);
});

test("one that has ended gives no beginning and stays as it was", async () => {
  const recording = new Recording([PIECE, PIECE], RATE, restless());
  const late = recording.beginning(160);
  const whole = recording.end();
  assert.equal(await late, null);
  assert.equal(new Set(await samplesOf(await whole)).size, 1);
  assert.equal(await new Recording([], RATE).end(), null);
});
