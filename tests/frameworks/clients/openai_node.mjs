// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for Node: a chat, the same chat streamed, and a text read aloud into a file.

import { writeFile } from "node:fs/promises";
import OpenAI from "openai";

const { OPENAI_BASE_URL: URL, OPENAI_API_KEY: KEY } = process.env;
delete process.env.OPENAI_BASE_URL;
delete process.env.OPENAI_API_KEY;
const client = new OpenAI({ baseURL: URL, apiKey: KEY });
const messages = [{ role: "user", content: "What color is the sky?" }];
const reply = await client.chat.completions.create({ model: "qwen2_5_omni", messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model: "qwen2_5_omni", messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const speech = await client.audio.speech.create({
  model: "qwen2_5_omni",
  voice: "alloy",
  input: "The sky is blue.",
});
await writeFile("speech.mp3", Buffer.from(await speech.arrayBuffer()));
console.log(JSON.stringify({ text: reply.choices[0].message.content, streamed }));
