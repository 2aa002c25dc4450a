// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for Node: a recording is written down, whole, as text, with its length and streamed; and translated.

import { createReadStream } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI();
const asked = () => ({ model: "qwen2_5_omni", file: createReadStream("question.wav") });
const written = (options) => client.audio.transcriptions.create({ ...asked(), ...options });
let pieces = "";
let streamed = "";
for await (const event of await written({ stream: true })) {
  if (event.type === "transcript.text.delta") {
    pieces += event.delta;
  } else {
    streamed = event.text;
  }
}
const verbose = await written({ response_format: "verbose_json" });
console.log(
  JSON.stringify({
    json: (await written({})).text,
    text: await written({ response_format: "text" }),
    verbose: verbose.text,
    seconds: verbose.duration,
    pieces,
    streamed,
    translated: (await client.audio.translations.create(asked())).text,
  }),
);
