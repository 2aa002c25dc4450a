// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for Node: a realtime session answers a written question, and then a spoken one, over either kind of
// its sockets. The server finds the turn.

import { readFile } from "node:fs/promises";
import { OpenAIRealtimeWebSocket } from "openai/realtime/websocket";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const HEADER_BYTES = 44;
const SILENCE = Buffer.alloc(32000); // a second, after which nobody speaks any more
const question = Buffer.concat([(await readFile("question.wav")).subarray(HEADER_BYTES), SILENCE]).toString("base64");

const ask = (connection) =>
  new Promise((resolve, reject) => {
    let bytes = 0;
    let text = "";
    let written = null;
    connection.on("error", reject);
    connection.on("session.created", () => {
      const input = { format: { type: "audio/pcm", rate: 16000 } };
      connection.send({ type: "session.update", session: { type: "realtime", audio: { input } } });
      const content = [{ type: "input_text", text: "What color is the sky?" }];
      connection.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
      connection.send({ type: "response.create" });
    });
    connection.on("response.output_audio.delta", ({ delta }) => {
      bytes += Buffer.from(delta, "base64").length;
    });
    connection.on("response.output_audio_transcript.delta", ({ delta }) => {
      text += delta;
    });
    connection.on("response.done", () => {
      const reply = { text, seconds: bytes / 48000 };
      if (written === null) {
        [written, text, bytes] = [reply, "", 0];
        connection.send({ type: "input_audio_buffer.append", audio: question });
      } else {
        connection.close();
        resolve({ written, spoken: reply });
      }
    });
  });

const model = "qwen2_5_omni";
const native = await ask(new OpenAIRealtimeWebSocket({ model }));
console.log(JSON.stringify({ native, ws: await ask(new OpenAIRealtimeWS({ model })) }));
