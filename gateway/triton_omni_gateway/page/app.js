// SPDX-License-Identifier: Apache-2.0
/** START HERE: the page's parts, and what they tell each other. */

import { Api, ApiError } from "./api.js";
import { Camera } from "./camera.js";
import { Composer } from "./composer.js";
import { Dialogue } from "./dialogue.js";
import { byId, element } from "./dom.js";
import { Health } from "./health.js";
import { Log } from "./log.js";
import { Microphone } from "./microphone.js";
import { Player } from "./player.js";
import { Talk } from "./talk.js";

const KEY = "omni-api-key";
const LEVEL_MS = 50;
const STATES = {
  connecting: "Connecting",
  locked: "Key needed",
  away: "Server away",
  ready: Microphone.isAllowed ? "Ready to talk" : "Ready",
  listening: "Listening",
  hearing: "Hearing you",
  thinking: "Thinking",
  writing: "Writing",
  speaking: "Speaking",
};

const api = new Api(() => sessionStorage.getItem(KEY) ?? "");
const health = new Health(api, followHealth);
const log = new Log(byId("log", HTMLElement));
const player = new Player();
const camera = new Camera((message) => showError(message));
const composer = new Composer({ send: () => ask(), refuse: (message) => showError(message) });
const dialogue = new Dialogue(api, player, log, { change: show, hear: beHeard, fail, close: closed });
const talk = new Talk({
  begin: beginTalk,
  heard: beginHearing,
  hear: (piece) => dialogue.hear(piece),
  end: endTalk,
  change: show,
  fail: (message) => showError(message),
});

const state = byId("state", HTMLElement);
const stopButton = byId("stop", HTMLButtonElement);
const freshButton = byId("fresh", HTMLButtonElement);
const settings = byId("settings", HTMLDialogElement);
const instructions = byId("instructions", HTMLTextAreaElement);
const speak = byId("speak", HTMLInputElement);
const voice = byId("voice", HTMLSelectElement);
const figures = byId("figures", HTMLInputElement);
const keyForm = byId("key-form", HTMLFormElement);
const keyInput = byId("key", HTMLInputElement);
const error = byId("error", HTMLElement);
const retryButton = byId("retry", HTMLButtonElement);

let isConnected = false;
let isLocked = false;
/** A question is on its way to the session. */
let isAsking = false;
/** The action of "Try again". */
let retry = connect;

/** @returns {keyof typeof STATES} */
function currentState() {
  const { reply } = dialogue;
  if (reply && !dialogue.isHearing) {
    return reply.isHeard ? "speaking" : reply.text ? "writing" : "thinking";
  }
  if (isLocked) {
    return "locked";
  }
  if (!health.isReady) {
    return "away";
  }
  if (!isConnected || (talk.isOn && !talk.isHeard)) {
    return "connecting";
  }
  if (dialogue.isWaiting || isAsking) {
    return "thinking";
  }
  return talk.isOn ? (dialogue.isHearing || !dialogue.findsTurns ? "hearing" : "listening") : "ready";
}

/** Show how things stand. */
function show() {
  const name = currentState();
  const isReady = isConnected && health.isReady && !isLocked;
  if (state.dataset.state !== name) {
    state.dataset.state = name;
    state.textContent = STATES[name];
  }
  composer.isReady = isReady && !isAsking && !dialogue.isWaiting;
  talk.isReady = isReady;
  if (!dialogue.reply && document.activeElement === stopButton) {
    composer.focus(); // which would otherwise be nowhere
  }
  stopButton.hidden = !dialogue.reply;
  freshButton.disabled = log.isEmpty || isAsking;
}

function followHealth() {
  if (health.isReady && !isConnected && !isLocked) {
    connect();
  } else if (!health.isReady && !dialogue.reply && !dialogue.isWaiting) {
    isConnected = false;
  }
  show();
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

/**
 * @param {Error} failure
 * @param {import("./composer.js").Draft | null} draft the question that was not answered
 */
function fail(failure, draft) {
  if (draft) {
    composer.restore(draft);
  }
  if (failure instanceof ApiError && failure.needsKey) {
    askForKey(failure.message);
    return;
  }
  showError(failure.message, draft ? ask : null);
  health.look();
}

/** @param {string} message why the key there is will not do; that there is none, the form tells by itself */
function askForKey(message) {
  isLocked = true;
  keyForm.hidden = false;
  keyInput.focus();
  error.hidden = true;
  if (sessionStorage.getItem(KEY)) {
    showError(message);
  }
  show();
}

async function connect() {
  try {
    const offer = await api.offer();
    const chosen = voice.value;
    voice.replaceChildren(...offer.voices.map((name) => element("option", { value: name, textContent: name })));
    voice.value = offer.voices.includes(chosen) ? chosen : (offer.voices[0] ?? "");
    byId("voice-label", HTMLElement).hidden = offer.voices.length === 0;
  } catch (failure) {
    if (failure instanceof ApiError && failure.needsKey) {
      askForKey(failure.message);
    } else if (failure instanceof ApiError && failure.isRefusal) {
      showError(failure.message, connect);
    }
    return; // health tells of all else, and asks again
  }
  isConnected = true;
  isLocked = false;
  keyForm.hidden = true;
  error.hidden = true;
  configure();
  show();
}

function configure() {
  document.body.classList.toggle("figures", figures.checked);
  dialogue.configure({ instructions: instructions.value.trim(), voice: voice.value, isSpoken: speak.checked });
}

/** Send the draft. */
async function ask() {
  player.unlock();
  log.hush();
  const draft = composer.take();
  error.hidden = true;
  isAsking = true;
  show();
  try {
    await dialogue.ask(draft, camera.see());
  } catch (failure) {
    fail(/** @type {Error} */ (failure), draft);
  } finally {
    isAsking = false;
    show();
  }
}

async function beginTalk() {
  player.unlock();
  log.hush();
  error.hidden = true;
  dialogue.stop();
  try {
    await dialogue.open();
    return true;
  } catch (failure) {
    fail(/** @type {Error} */ (failure), null);
    return false;
  }
}

function beginHearing() {
  if (!dialogue.findsTurns) {
    beHeard();
  }
  show();
}

function endTalk() {
  if (dialogue.isHearing || !dialogue.findsTurns) {
    dialogue.answer();
  } else {
    dialogue.unhear();
  }
  show();
}

/** The user begins to speak, and shows what is attached and what the camera sees. */
function beHeard() {
  log.hush();
  const media = composer.takeMedia();
  try {
    dialogue.show(media, camera.see());
  } catch (failure) {
    fail(/** @type {Error} */ (failure), { text: "", media });
  }
}

function closed() {
  talk.off();
  health.look();
}

function startAfresh() {
  dialogue.reset();
  log.clear();
  error.hidden = true;
  show();
  composer.focus();
}

stopButton.addEventListener("click", () => dialogue.stop());
freshButton.addEventListener("click", startAfresh);
retryButton.addEventListener("click", () => retry());
byId("options", HTMLButtonElement).addEventListener("click", () => settings.showModal());
byId("done", HTMLButtonElement).addEventListener("click", () => settings.close());
settings.addEventListener("close", configure);
figures.addEventListener("change", configure);
byId("starters", HTMLElement).addEventListener("click", ({ target }) => {
  if (target instanceof HTMLButtonElement) {
    composer.write(target.textContent);
    composer.submit();
  }
});
byId("dismiss", HTMLButtonElement).addEventListener("click", () => {
  error.hidden = true;
  composer.focus();
});
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, keyInput.value);
  keyInput.value = "";
  connect();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settings.open) {
    dialogue.stop();
  }
});
setInterval(() => {
  if (dialogue.reply || !talk.isOn) {
    talk.level = dialogue.reply?.level ?? 0;
  }
}, LEVEL_MS);
health.look();
