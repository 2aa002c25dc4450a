// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { Conversation } from "../../gateway/triton_omni_gateway/page/conversation.js";
import { kindOf, partOf } from "../../gateway/triton_omni_gateway/page/media.js";

/** @param {string} text */
const says = (text) => [{ type: /** @type {const} */ ("text"), text }];

test("a request has all turns before, and of each reply what is kept", () => {
  const conversation = new Conversation();
  conversation.keep(says("one"), "first");
  conversation.keep(says("two"), "");
  assert.deepEqual(conversation.asking(says("three")), [
    { role: "user", content: says("one") },
    { role: "assistant", content: "first" },
    { role: "user", content: says("two") },
    { role: "user", content: says("three") },
  ]);
  conversation.reset();
  assert.equal(conversation.asking(says("four")).length, 1);
});

test("media are the parts that the gateway takes", () => {
  assert.deepEqual(partOf("image", "image/png", "data:image/png;base64,AA=="), {
    type: "image_url",
    image_url: { url: "data:image/png;base64,AA==" },
  });
  assert.deepEqual(partOf("audio", "audio/mpeg", "data:audio/mpeg;base64,AA=="), {
    type: "input_audio",
    input_audio: { data: "AA==", format: "mp3" },
  });
  assert.equal(partOf("audio", "audio/aac", "data:audio/aac;base64,AA==").type, "audio_url");
  assert.equal(partOf("video", "video/mp4", "data:video/mp4;base64,AA==").type, "video_url");
});

test("what is no image, sound or video has no kind", () => {
  assert.deepEqual(["image/webp", "audio/ogg", "video/webm", "text/html", ""].map(kindOf), [
    "image",
    "audio",
    "video",
    null,
    null,
  ]);
});
