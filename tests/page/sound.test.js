// SPDX-License-Identifier: Apache-2.0
import assert from "node:assert/strict";
import { test } from "node:test";
import { loudness, Pcm16Decoder, pcm16, wavFile } from "../../gateway/triton_omni_gateway/page/sound.js";

/** @param {number[]} bytes */
const base64 = (bytes) => Buffer.from(bytes).toString("base64");

test("PCM16 is decoded to full scale, and never beyond it", () => {
  const samples = new Pcm16Decoder().feed(base64([0xff, 0x7f, 0x01, 0x80, 0x00, 0x80, 0x00, 0x00, 0xff, 0xff]));
  assert.deepEqual(Array.from(samples), [1, -1, -1, 0, Math.fround(-1 / 32767)]);
});

test("a sample cut in two waits for its other half", () => {
  const decoder = new Pcm16Decoder();
  assert.deepEqual(Array.from(decoder.feed(base64([0xff]))), []);
  assert.deepEqual(Array.from(decoder.feed(base64([0x7f, 0x01]))), [1]);
  assert.deepEqual(Array.from(decoder.feed(base64([0x80]))), [-1]);
});

test("a WAV file has the header of its samples, which are clipped", () => {
  const file = Buffer.from(wavFile([new Float32Array([0, 1, -1]), new Float32Array([2, -2, 0.5])], 16000));
  assert.equal(file.length, 44 + 12);
  assert.equal(file.toString("latin1", 0, 4) + file.toString("latin1", 8, 16), "RIFFWAVEfmt ");
  assert.deepEqual([file.readUInt32LE(4), file.readUInt32LE(24), file.readUInt32LE(28)], [48, 16000, 32000]);
  assert.deepEqual(
    [20, 22, 32, 34].map((at) => file.readUInt16LE(at)),
    [1, 1, 2, 16],
  );
  assert.deepEqual([file.toString("latin1", 36, 40), file.readUInt32LE(40)], ["data", 12]);
  assert.deepEqual(
    [0, 1, 2, 3, 4, 5].map((at) => file.readInt16LE(44 + 2 * at)),
    [0, 32767, -32767, 32767, -32767, 16384],
  );
});

test("loudness is the root mean square", () => {
  assert.equal(loudness(new Float32Array([0.5, -0.5])), 0.5);
  assert.equal(loudness(new Float32Array()), 0);
});

test("PCM16 of any length is decoded to what it was made of", () => {
  const samples = Float32Array.from({ length: 20_000 }, (_, at) => ((at % 65_535) - 32_767) / 32_767);
  assert.deepEqual(new Pcm16Decoder().feed(pcm16(samples)), samples);
});
