// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventParser } from "../../gateway/triton_omni_gateway/page/sse.js";

const STREAM = ': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\n\ndata: cut';
const EVENTS = ['{"a": 1}', "two\nlines", "[DONE]"];

test("events come as they are completed, and what is cut off is none", () => {
  assert.deepEqual(new EventParser().feed(STREAM), EVENTS);
});

test("a stream may be cut anywhere", () => {
  const parser = new EventParser();
  assert.deepEqual(
    Array.from(STREAM).flatMap((character) => parser.feed(character)),
    EVENTS,
  );
});
