// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { Conversation, newId } from "../../gateway/triton_omni_gateway/page/conversation.js";

test("a new session is told all that has words or media, in its order", () => {
  const conversation = new Conversation();
  const shown = [{ type: /** @type {const} */ ("input_image"), image_url: "data:image/jpeg;base64,AA==" }];
  conversation.keepWords("a", "user", "");
  conversation.keep("b", "user", shown);
  conversation.keepWords("c", "assistant", "first");
  conversation.keepWords("d", "user", "");
  conversation.keepWords("a", "user", "one");
  conversation.keepWords("e", "assistant", "gone");
  conversation.remove("e");
  assert.deepEqual(conversation.items, [
    { id: "a", role: "user", content: [{ type: "input_text", text: "one" }] },
    { id: "b", role: "user", content: shown },
    { id: "c", role: "assistant", content: [{ type: "output_text", text: "first" }] },
  ]);
});

test("ids are drawn", () => {
  assert.notEqual(newId(), newId());
});
