// SPDX-License-Identifier: Apache-2.0
/** Files to parts of a message. What may be in them is the server's to say; a file of no known kind is refused here. */

import { isSoundAlone } from "./containers.js";

/**
 * @typedef {"image" | "audio" | "video"} Kind
 * @typedef {{kind: Kind, name: string, url: string, part: import("./conversation.js").Part}} Medium `url` is an object
 *   URL for its preview, to be revoked by whoever drops the medium
 */

/** Characters that change the direction of what follows them: in a name they turn the sentence around it. */
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

/** Formats that `input_audio` names, by media type; others go as they are, for the server to judge. */
const AUDIO_FORMATS = new Map([
  ["audio/wav", "wav"],
  ["audio/x-wav", "wav"],
  ["audio/wave", "wav"],
  ["audio/vnd.wave", "wav"],
  ["audio/mpeg", "mp3"],
  ["audio/mp3", "mp3"],
  ["audio/flac", "flac"],
  ["audio/x-flac", "flac"],
  ["audio/ogg", "ogg"],
]);

/**
 * What a file shows or plays; null for anything else. A browser calls every `.webm` and `.mp4` a video.
 * @param {Blob} file
 * @returns {Promise<Kind | null>}
 */
export async function kindOf(file) {
  const [kind] = file.type.split("/");
  if (kind === "video") {
    return isSoundAlone(new Uint8Array(await file.arrayBuffer())) ? "audio" : "video";
  }
  return kind === "image" || kind === "audio" ? kind : null;
}

/**
 * @param {File} file
 * @returns {Promise<Medium>}
 * @throws {Error} the file cannot be read, or is neither an image nor a sound nor a video
 */
export async function mediumOf(file) {
  const kind = await kindOf(file);
  const name = nameOf(file);
  if (!kind) {
    throw new Error(`${name} is neither an image nor a sound nor a video.`);
  }
  const part = await partOfFile(kind, file);
  return { kind, name, url: URL.createObjectURL(file), part };
}

/**
 * @param {Kind} kind
 * @param {File} file
 * @throws {Error} the file cannot be read
 */
export async function partOfFile(kind, file) {
  return partOf(kind, file.type, await dataUri(file));
}

/**
 * @param {Kind} kind
 * @param {string} type its media type
 * @param {string} url a data URI of its bytes
 * @returns {import("./conversation.js").Part}
 */
export function partOf(kind, type, url) {
  const format = AUDIO_FORMATS.get(type.split(";")[0]);
  if (kind === "image") {
    return { type: "image_url", image_url: { url } };
  }
  if (kind === "video") {
    return { type: "video_url", video_url: { url } };
  }
  return format
    ? { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } }
    : { type: "audio_url", audio_url: { url } };
}

/**
 * A refusal as whoever chose the files knows it: by the file's name, where it names a file by its place in the request.
 * @param {import("./api.js").ApiError} refusal
 * @param {number} at the question's place among the messages
 * @param {Medium[]} media of the question, the first of its parts
 */
export function inFileNames({ message, param }, at, media) {
  const [, asked, place] = /^messages\[(\d+)\]\.content\[(\d+)\]\./.exec(param ?? "") ?? [];
  const medium = Number(asked) === at ? media[Number(place)] : undefined;
  return param && medium ? message.replace(param, () => medium.name) : message;
}

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(/** @type {string} */ (reader.result));
    reader.onerror = () => reject(new Error(`${nameOf(file)} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** @param {File} file */
function nameOf(file) {
  return file.name.replace(TURNS, "\ufffd");
}
