// SPDX-License-Identifier: Apache-2.0
/** START HERE: the page's parts, and what they tell each other. */

import { Api, ApiError } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { Health } from "./health.js";
import { Hints } from "./hints.js";
import { Log } from "./log.js";
import { inFileNames, partOfFile } from "./media.js";
import { Player } from "./player.js";
import { Reply } from "./reply.js";
import { Talk } from "./talk.js";

const KEY = "omni-api-key";
const STATES = {
  connecting: "Connecting",
  locked: "Key needed",
  ready: "Ready",
  away: "Server away",
  listening: "Listening",
  thinking: "Thinking",
  writing: "Writing",
  speaking: "Speaking",
  stopped: "Stopped",
  error: "Error",
};

const api = new Api(() => sessionStorage.getItem(KEY) ?? "");
const conversation = new Conversation();
const health = new Health(api, followHealth);
const log = new Log(byId("log", HTMLElement));
const player = new Player();
const composer = new Composer({
  send: () => ask(),
  change: showVideoOption,
  refuse: (message) => showError(message),
});
const talk = new Talk({
  begin: makeQuiet,
  listen,
  grow: (recording) => hints.follow(recording),
  end: hear,
  fail: (message) => showError(message),
});

const hints = new Hints(hint);

const state = byId("state", HTMLElement);
const stateText = byId("state-text", HTMLElement);
const stopButton = byId("stop", HTMLButtonElement);
const freshButton = byId("fresh", HTMLButtonElement);
const speak = byId("speak", HTMLInputElement);
const voice = byId("voice", HTMLSelectElement);
const sounding = byId("sounding", HTMLInputElement);
const keyForm = byId("key-form", HTMLFormElement);
const keyInput = byId("key", HTMLInputElement);
const error = byId("error", HTMLElement);
const retryButton = byId("retry", HTMLButtonElement);

let model = "";
let hasVideo = false;
/** The reply that runs. @type {Reply | null} */
let reply = null;
/** Fulfilled when the reply that runs has ended and is kept. @type {Promise<void>} */
let ended = Promise.resolve();
/** What to do at "Try again". */
let retry = connect;

/** @param {keyof typeof STATES} name */
function showState(name) {
  if (state.dataset.state !== name) {
    state.dataset.state = name;
    stateText.textContent = STATES[name];
  }
}

/** Show that nothing is under way: a question may be asked where the server takes one. */
function showRest() {
  composer.isReady = health.isReady;
  showState(health.isReady ? "ready" : "away");
}

function followHealth() {
  const now = state.dataset.state ?? "";
  if (reply || talk.isRecording) {
    return;
  }
  if (!health.isReady && ["ready", "stopped", "error"].includes(now)) {
    showRest();
  } else if (health.isReady && now === "away") {
    connect();
  }
}

/**
 * @param {string} message
 * @param {(() => Promise<void>) | null} again what would try it again
 */
function showError(message, again = null) {
  byId("error-text", HTMLElement).textContent = message;
  retryButton.hidden = again === null;
  retry = again ?? retry;
  error.hidden = false;
}

function showVideoOption() {
  byId("sounding-label", HTMLElement).hidden = !hasVideo && !composer.hasVideo;
}

/**
 * @param {unknown} failure
 * @param {() => Promise<void>} again what would try it again
 */
function fail(failure, again) {
  const message = failure instanceof Error ? failure.message : String(failure);
  if (failure instanceof ApiError && failure.needsKey) {
    askForKey(message);
    return;
  }
  showState("error");
  showError(message, again);
  health.look();
}

/** @param {string} message why the key there is will not do; that there is none, the form tells by itself */
function askForKey(message) {
  showState("locked");
  composer.isReady = false;
  keyForm.hidden = false;
  keyInput.focus();
  error.hidden = true;
  if (sessionStorage.getItem(KEY)) {
    showError(message);
  }
}

async function connect() {
  const wasAway = state.dataset.state === "away";
  showState("connecting");
  try {
    const [offer] = await Promise.all([api.offer(), health.look()]);
    model = offer.model;
    const chosen = voice.value;
    const names = ["", ...offer.voices];
    voice.replaceChildren(...names.map((name) => element("option", { value: name, textContent: name || "Default" })));
    voice.value = names.includes(chosen) ? chosen : "";
  } catch (failure) {
    fail(failure, connect);
    return;
  }
  keyForm.hidden = true;
  error.hidden = true;
  showRest();
  if (!wasAway) {
    composer.focus();
  }
}

/** Send the draft; a reply that still runs is cut off first. */
async function ask() {
  player.unlock();
  const draft = composer.take();
  await stop();
  error.hidden = true;
  ended = exchange(draft);
  await ended;
}

/** @param {import("./composer.js").Draft} draft */
async function exchange({ text, media }) {
  hasVideo ||= media.some(({ kind }) => kind === "video");
  showVideoOption();
  const content = [...media.map(({ part }) => part), ...(text ? [{ type: /** @type {const} */ ("text"), text }] : [])];
  const question = log.ask(text, media);
  const view = log.reply();
  showState("thinking");
  stopButton.hidden = false;
  freshButton.disabled = false;
  const running = new Reply(speak.checked ? player.begin() : null, (account) => follow(view, account));
  reply = running;
  try {
    const kept = await running.run(api, bodyOf(content));
    conversation.keep(content, kept);
    view.end(running.account, kept, running.isStopped);
    running.isStopped ? showState("stopped") : showRest();
  } catch (failure) {
    log.remove(question, view.root);
    composer.restore({ text, media });
    if (failure instanceof ApiError) {
      failure.message = inFileNames(failure, conversation.asking(content).length - 1, media);
    }
    fail(failure, ask);
  } finally {
    reply = null;
    hideStop();
  }
}

/** Without taking the focus with it. */
function hideStop() {
  if (document.activeElement === stopButton) {
    composer.focus();
  }
  stopButton.hidden = true;
}

/**
 * @param {import("./log.js").ReplyView} view
 * @param {import("./reply.js").Account} account
 */
function follow(view, account) {
  view.show(account);
  if (account.firstAudio !== null) {
    showState("speaking");
  } else if (account.firstText !== null) {
    showState("writing");
  }
}

/** @param {import("./conversation.js").Part[]} content */
function bodyOf(content) {
  const audio = { format: "pcm16", ...(voice.value ? { voice: voice.value } : {}) };
  return {
    model,
    messages: conversation.asking(content),
    prompt_cache_key: conversation.cacheKey,
    ...(speak.checked ? { modalities: ["text", "audio"], audio } : { modalities: ["text"] }),
    ...((hasVideo || composer.hasVideo) && sounding.checked ? { use_audio_in_video: true } : {}),
    ...(conversation.inPieces ? { audio_in_pieces: true } : {}),
  };
}

/** Cut the reply off, if one runs; fulfilled when it is kept. */
async function stop() {
  while (reply) {
    reply.stop();
    await ended;
  }
}

async function makeQuiet() {
  player.unlock();
  await stop();
}

function listen() {
  conversation.inPieces = true;
  showState("listening");
}

/** @param {File} sound what the user has said so far */
async function hint(sound) {
  const part = await partOfFile("audio", sound);
  await api.prefill(bodyOf([...composer.parts, part]));
}

/** @param {File | null} speech */
async function hear(speech) {
  showRest();
  if (speech) {
    await composer.attach([speech]);
    composer.submit();
  }
}

async function startAfresh() {
  await stop();
  conversation.reset();
  log.clear();
  hasVideo = false;
  error.hidden = true;
  freshButton.disabled = true;
  showVideoOption();
  showRest();
  composer.focus();
}

stopButton.addEventListener("click", stop);
freshButton.addEventListener("click", startAfresh);
retryButton.addEventListener("click", () => retry());
byId("dismiss", HTMLButtonElement).addEventListener("click", () => {
  error.hidden = true;
  if (model && state.dataset.state === "error") {
    showRest();
  }
  composer.focus();
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, keyInput.value);
  keyInput.value = "";
  connect();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    talk.isRecording ? talk.cancel().then(showRest) : stop();
  }
});
connect();
