// SPDX-License-Identifier: Apache-2.0
/** Files to parts of a question, as sessions take them: pictures, and sound. A video is both. */

import { pcm16, SPEECH_RATE } from "./sound.js";

/**
 * @typedef {{type: "input_text", text: string}
 *   | {type: "output_text", text: string}
 *   | {type: "input_image", image_url: string}
 *   | {type: "input_audio", audio: string}} Part a part of an item
 * @typedef {"image" | "audio" | "video"} Kind
 * @typedef {{kind: Kind, name: string, url: string, parts: Part[]}} Medium `url` is an object URL for its preview, to be
 *   revoked by whoever drops the medium
 */

/** Characters that change the direction of what follows them: in a name they turn the sentence around it. */
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;
/** Pixels of a picture beyond which the model sees no more. */
const MOST_PIXELS = 1 << 20;
const JPEG_QUALITY = 0.85;
/** Pictures of a video, one a second at most. */
const MOST_FRAMES = 8;

/**
 * @param {File} file
 * @returns {Promise<Medium>}
 * @throws {Error} the file cannot be read, or is neither an image nor a sound nor a video
 */
export async function mediumOf(file) {
  const name = file.name.replace(TURNS, "\ufffd");
  const kind = file.type.split("/")[0];
  if (kind !== "image" && kind !== "audio" && kind !== "video") {
    throw new Error(`${name} is neither an image nor a sound nor a video.`);
  }
  const url = URL.createObjectURL(file);
  try {
    return { name, url, ...(await READERS[kind](file, url)) };
  } catch {
    URL.revokeObjectURL(url);
    throw new Error(`This browser cannot read ${name}.`);
  }
}

/**
 * A picture as sessions take it, in the size that the model sees.
 * @param {CanvasImageSource} source
 * @param {number} width
 * @param {number} height
 * @returns {string} a data URI
 */
export function pictureOf(source, width, height) {
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = "white"; // shines through where the picture is clear
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", JPEG_QUALITY);
}

/** @type {Record<Kind, (file: File, url: string) => Promise<{kind: Kind, parts: Part[]}>>} */
const READERS = { image: imageOf, audio: audioOf, video: videoOf };

/** @param {File} _file @param {string} url @returns {Promise<{kind: Kind, parts: Part[]}>} */
async function imageOf(_file, url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return {
    kind: "image",
    parts: [{ type: "input_image", image_url: pictureOf(image, image.naturalWidth, image.naturalHeight) }],
  };
}

/** @param {File} file @returns {Promise<{kind: Kind, parts: Part[]}>} */
async function audioOf(file) {
  return { kind: "audio", parts: await soundOf(file) };
}

/** @param {File} file @returns {Promise<Part[]>} */
async function soundOf(file) {
  const context = new OfflineAudioContext(1, 1, SPEECH_RATE);
  const sound = await context.decodeAudioData(await file.arrayBuffer());
  const mono = sound.getChannelData(0);
  for (let channel = 1; channel < sound.numberOfChannels; channel += 1) {
    sound.getChannelData(channel).forEach((sample, at) => {
      mono[at] += sample;
    });
  }
  return [{ type: "input_audio", audio: pcm16(mono.map((sample) => sample / sound.numberOfChannels)) }];
}

/**
 * Browsers call every `.webm` and `.mp4` a video: one without pictures is a sound.
 * @param {File} file
 * @param {string} url
 * @returns {Promise<{kind: Kind, parts: Part[]}>}
 */
async function videoOf(file, url) {
  const frames = await framesOf(url);
  const sound = await soundOf(file).catch((error) => (frames.length ? [] : Promise.reject(error)));
  return { kind: frames.length ? "video" : "audio", parts: [...frames, ...sound] };
}

/** @param {string} url @returns {Promise<Part[]>} */
async function framesOf(url) {
  const video = document.createElement("video");
  video.muted = true;
  video.preload = "auto";
  await happened(video, "loadeddata", () => {
    video.src = url;
  });
  const { videoWidth, videoHeight, duration } = video;
  const seconds = Number.isFinite(duration) ? duration : 0; // a recording that was never finished has none
  const count = videoWidth ? Math.min(MOST_FRAMES, Math.max(1, Math.floor(seconds))) : 0;
  /** @type {Part[]} */
  const frames = [];
  for (let number = 0; number < count; number += 1) {
    await happened(video, "seeked", () => {
      video.currentTime = ((number + 0.5) * seconds) / count;
    });
    frames.push({ type: "input_image", image_url: pictureOf(video, videoWidth, videoHeight) });
  }
  return frames;
}

/**
 * @param {HTMLVideoElement} video
 * @param {string} event
 * @param {() => void} begin what leads to it
 */
function happened(video, event, begin) {
  return new Promise((resolve, reject) => {
    video.addEventListener(event, resolve, { once: true });
    video.addEventListener("error", reject, { once: true });
    begin();
  });
}
