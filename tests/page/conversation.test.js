// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError } from "../../gateway/triton_omni_gateway/page/api.js";
import { Conversation } from "../../gateway/triton_omni_gateway/page/conversation.js";
import { inFileNames, kindOf, partOf } from "../../gateway/triton_omni_gateway/page/media.js";

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
  conversation.inPieces = true;
  conversation.reset();
  assert.equal(conversation.asking(says("four")).length, 1);
  assert.equal(conversation.inPieces, false);
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

test("what is no image, sound or video has no kind", async () => {
  const kinds = ["image/webp", "audio/ogg", "video/webm", "text/html", ""].map((type) =>
    kindOf(new Blob([], { type })),
  );
  assert.deepEqual(await Promise.all(kinds), ["image", "audio", "video", null, null]);
});

test("a refused file is called by its name, if it is the question's", () => {
  const [first, second] = ["a$&.png", "b.png"].map((name) => {
    const part = partOf("image", "image/png", "data:,");
    return { kind: /** @type {const} */ ("image"), name, url: "", part };
  });
  /** @param {string | null} param */
  const told = (param) => inFileNames(new ApiError(`${param}: is too large`, 413, param), 2, [first, second]);
  assert.equal(told("messages[2].content[0].image_url.url"), "a$&.png: is too large");
  assert.equal(told("messages[2].content[1].image_url.url"), "b.png: is too large");
  for (const param of ["messages[0].content[0].image_url.url", "messages[2].content[2].text", "messages", null]) {
    assert.equal(told(param), `${param}: is too large`);
  }
});
