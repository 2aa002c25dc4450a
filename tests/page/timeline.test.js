// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { Timeline } from "../../gateway/triton_omni_gateway/page/timeline.js";

const RATE = 24000;
const LEAD = 0.03;
const FIRST = 720;

test("each chunk begins at the sample where the one before ends", () => {
  const timeline = new Timeline(RATE, LEAD);
  const lengths = [480, 1, 7777, 24000];
  const places = lengths.map((length, at) => timeline.place(at * 0.001, length));
  assert.deepEqual(places, [FIRST, FIRST + 480, FIRST + 481, FIRST + 8258]);
  assert.deepEqual([timeline.length, timeline.gaps], [32258, 0]);
});

test("what comes too late begins anew, and the gap is counted", () => {
  const timeline = new Timeline(RATE, LEAD);
  timeline.place(0, 2400);
  assert.equal(timeline.place(1, 2400), RATE + FIRST);
  assert.equal(timeline.place(1.05, 2400), RATE + FIRST + 2400);
  assert.equal(timeline.gaps, 1);
});

test("a chunk at the very end of the one before still follows it", () => {
  const timeline = new Timeline(RATE, 0);
  timeline.place(0, 2400);
  assert.equal(timeline.place(0.1, 2400), 2400);
  assert.equal(timeline.gaps, 0);
});

test("heard is what was played, without the gaps and no more than came", () => {
  const timeline = new Timeline(RATE, 0);
  timeline.place(0, RATE);
  timeline.place(3, RATE);
  const heard = [-1, 0, 0.5, 1, 2, 3.25, 9].map((now) => timeline.heard(now));
  assert.deepEqual(heard, [0, 0, 0.5, 1, 1, 1.25, 2]);
});
