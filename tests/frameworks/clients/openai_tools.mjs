// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for Node: a reply that calls a function, whole and streamed, and the reply after the call's result.

import OpenAI from "openai";

const client = new OpenAI();
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "The weather in a city.", parameters, strict: true };
const chat = { model: "qwen2_5_omni", tools: [{ type: "function", function: weather }] };
const question = { role: "user", content: "What is the weather in Paris?" };
const asked = { ...chat, messages: [question], tool_choice: "required" };
const first = (await client.chat.completions.create(asked)).choices[0];
const call = first.message.tool_calls[0];
const streamed = { name: "", arguments: "" };
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  for (const piece of chunk.choices[0]?.delta?.tool_calls ?? []) {
    streamed.name += piece.function.name ?? "";
    streamed.arguments += piece.function.arguments ?? "";
  }
}
const result = { role: "tool", tool_call_id: call.id, content: "The sky is blue." };
const messages = [question, first.message, result];
const last = await client.chat.completions.create({ ...chat, messages, tool_choice: "none" });
console.log(
  JSON.stringify({
    name: call.function.name,
    arguments: JSON.parse(call.function.arguments),
    reason: first.finish_reason,
    streamed: streamed.name,
    streamed_arguments: JSON.parse(streamed.arguments),
    answer: last.choices[0].message.content,
  }),
);
