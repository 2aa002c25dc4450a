// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError } from "../../gateway/triton_omni_gateway/page/api.js";
import { Hints, REACH, WINDOW } from "../../gateway/triton_omni_gateway/page/hints.js";

/** A recording as long as a test says; a file of it has as many bytes as samples. */
class Spoken {
  length = 0;
  isOver = false;

  /** @param {number} samples */
  async beginning(samples) {
    return this.isOver ? null : new File([new Uint8Array(samples)], "speech.wav");
  }
}

/** Hints whose answers a test gives one by one. */
function sending() {
  /** @type {number[]} */
  const sent = [];
  /** @type {((error?: Error) => void)[]} */
  const answers = [];
  const hints = new Hints((sound) => {
    sent.push((sound.size - REACH) / WINDOW);
    return new Promise((resolve, reject) => answers.push((error) => (error ? reject(error) : resolve())));
  });
  return { hints, sent, answer: (/** @type {Error | undefined} */ error) => answers.shift()?.(error) };
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

test("a window is sent once all that it reaches is there", async () => {
  const { hints, sent, answer } = sending();
  const spoken = new Spoken();
  for (const windows of [1, 2, 3]) {
    for (const length of [windows * WINDOW + REACH - 1, windows * WINDOW + REACH, windows * WINDOW + REACH + 9]) {
      spoken.length = length;
      hints.follow(spoken);
      await settled();
      assert.equal(sent.length, length % WINDOW < REACH ? windows - 1 : windows);
      answer();
      await settled();
    }
  }
  assert.deepEqual(sent, [1, 2, 3]);
});

test("one hint is under way, and the newest length is next", async () => {
  const { hints, sent, answer } = sending();
  const spoken = new Spoken();
  for (const windows of [1, 2, 4]) {
    spoken.length = windows * WINDOW + REACH;
    hints.follow(spoken);
    await settled();
  }
  assert.deepEqual(sent, [1]);
  answer();
  await settled();
  hints.follow(spoken);
  await settled();
  assert.deepEqual(sent, [1, 4]);
});

test("a refusal ends the hints, also of later recordings", async () => {
  for (const status of [400, 413, 500]) {
    const { hints, sent, answer } = sending();
    for (const windows of [1, 2, 3]) {
      const spoken = new Spoken();
      spoken.length = windows * WINDOW + REACH;
      hints.follow(spoken);
      await settled();
      answer(new ApiError("this deployment keeps no prompts", status));
      await settled();
    }
    assert.deepEqual(sent, [1], `${status}`);
  }
});

test("a passing error costs one hint", async () => {
  for (const status of [0, 401, 429, 503, 504]) {
    const { hints, sent, answer } = sending();
    const spoken = new Spoken();
    for (const windows of [1, 1, 2]) {
      spoken.length = windows * WINDOW + REACH;
      hints.follow(spoken);
      await settled();
      answer(new ApiError("later", status));
      await settled();
    }
    assert.deepEqual(sent, [1, 2], `${status}`);
  }
});

test("every recording begins anew, and one that has ended sends nothing", async () => {
  const { hints, sent, answer } = sending();
  for (const isOver of [false, true, false]) {
    const spoken = Object.assign(new Spoken(), { length: WINDOW + REACH, isOver });
    hints.follow(spoken);
    await settled();
    answer();
    await settled();
  }
  assert.deepEqual(sent, [1, 1]);
});
