// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for Node: a realtime session answers a written question, over either kind of its sockets.

import { OpenAIRealtimeWebSocket } from "openai/realtime/websocket";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const ask = (connection) =>
  new Promise((resolve, reject) => {
    let bytes = 0;
    let text = "";
    connection.on("error", reject);
    connection.on("session.created", () => {
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
      connection.close();
      resolve({ text, seconds: bytes / 48000 });
    });
  });

const model = "qwen2_5_omni";
const native = await ask(new OpenAIRealtimeWebSocket({ model }));
console.log(JSON.stringify({ native, ws: await ask(new OpenAIRealtimeWS({ model })) }));
