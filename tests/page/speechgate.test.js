// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { SpeechGate } from "../../gateway/triton_omni_gateway/page/speechgate.js";

const PIECE_S = 0.02;

/**
 * When the gate opens and closes, in seconds.
 * @param {[number, number][]} sounds loudness and seconds, one after the other
 */
function changes(sounds) {
  const gate = new SpeechGate();
  const pieces = sounds.flatMap(([level, seconds]) => Array(Math.round(seconds / PIECE_S)).fill(level));
  return pieces.flatMap((level, at) => {
    const change = gate.feed(level, PIECE_S);
    return change ? [[change, Number(((at + 1) * PIECE_S).toFixed(2))]] : [];
  });
}

test("speech opens the gate at once, and a second of quiet closes it", () => {
  assert.deepEqual(
    changes([
      [0.001, 2],
      [0.1, 1.5],
      [0.001, 2],
    ]),
    [
      ["begin", 2.12],
      ["end", 4.4],
    ],
  );
});

test("a pause between words does not close it", () => {
  assert.deepEqual(
    changes([
      [0.1, 1],
      [0.001, 0.6],
      [0.1, 1],
      [0.001, 0.5],
    ]),
    [["begin", 0.12]],
  );
});

test("a knock is not speech, nor is a quiet room", () => {
  assert.deepEqual(
    changes([
      [0.002, 1],
      [0.5, 0.08],
      [0.002, 1],
      [0.01, 5],
    ]),
    [],
  );
});

test("a loud room is learnt, and speech is louder", () => {
  const room = changes([
    [0.05, 30],
    [0.4, 1],
    [0.05, 2],
  ]).filter(([, at]) => Number(at) > 29);
  assert.deepEqual(
    room.map(([change]) => change),
    ["begin", "end"],
  );
});
