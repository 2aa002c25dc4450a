// SPDX-License-Identifier: Apache-2.0
/** Questions, replies and interruptions of a session. Each event changes what is seen and heard. */

import { ApiError } from "./api.js";
import { Conversation, newId } from "./conversation.js";
import { Reply } from "./reply.js";
import { Session } from "./session.js";
import { pcm16, SPEECH_RATE } from "./sound.js";

/**
 * @typedef {import("./composer.js").Draft} Draft
 * @typedef {{instructions: string, voice: string, isSpoken: boolean}} Settings
 * @typedef {object} Told
 * @property {() => void} change who speaks, or what is waited for
 * @property {() => void} hear the user begins to speak
 * @property {(failure: Error, draft: Draft | null) => void} fail what went wrong, and the question that it took back
 * @property {() => void} close the session is over
 */

/** A response ended while its cancel was on its way. */
const PASSED = "response_cancel_not_active";

export class Dialogue {
  #session;
  #player;
  #log;
  #told;
  /** @type {Settings} */
  #settings = { instructions: "", voice: "", isSpoken: true };
  #conversation = new Conversation();
  /** @type {Promise<void> | null} */
  #opening = null;
  /** The question whose reply is awaited or given. @type {{id: string, draft: Draft | null} | null} */
  #question = null;
  /** When it was complete. */
  #askedAt = 0;
  /** Views of items, by id. @type {Map<string, import("./log.js").View>} */
  #views = new Map();
  /** The reply that is given. @type {Reply | null} */
  reply = null;
  /** True while the user speaks. */
  isHearing = false;
  /** True from the moment a reply is asked for until it begins. */
  isWaiting = false;
  /** True if the session finds by itself when somebody begins and ends to speak. */
  findsTurns = false;

  /**
   * @param {import("./api.js").Api} api
   * @param {import("./player.js").Player} player
   * @param {import("./log.js").Log} log
   * @param {Told} told
   */
  constructor(api, player, log, told) {
    this.#session = new Session(api, { event: (event) => this.#take(event), closed: () => this.#closed() });
    this.#player = player;
    this.#log = log;
    this.#told = told;
  }

  /**
   * Have a session, which knows what was said before.
   * @throws {ApiError}
   */
  async open() {
    this.#opening ??= this.#begin().catch((error) => {
      this.#opening = null;
      throw error;
    });
    await this.#opening;
  }

  /** @param {Settings} settings */
  configure(settings) {
    this.#settings = settings;
    this.#update();
  }

  /**
   * Ask in writing; a reply that is given is cut off first.
   * @param {Draft} draft
   * @param {import("./media.js").Part[]} seen what the camera sees
   * @throws {ApiError} nothing was asked
   */
  async ask(draft, seen) {
    this.stop();
    const { text, media } = draft;
    const id = newId();
    const said = text ? [{ type: /** @type {const} */ ("input_text"), text }] : [];
    const content = [...media.flatMap(({ parts }) => parts), ...seen, ...said];
    const view = this.#log.ask(text, media);
    try {
      await this.open();
      this.#create({ id, role: "user", content });
    } catch (failure) {
      this.#log.remove(view);
      throw failure;
    }
    this.#show(id, view);
    this.#conversation.keep(id, "user", content);
    this.#wait({ id, draft });
  }

  /**
   * Show something while the user speaks.
   * @param {import("./media.js").Medium[]} media
   * @param {import("./media.js").Part[]} seen what the camera sees
   * @throws {ApiError} it is too much
   */
  show(media, seen) {
    const content = [...media.flatMap(({ parts }) => parts), ...seen];
    if (content.length) {
      const id = newId();
      this.#create({ id, role: "user", content });
      this.#conversation.keep(id, "user", content);
    }
    if (media.length) {
      this.#log.ask("", media);
    }
  }

  /** @param {Float32Array} piece what the microphone hears next, at 16 kHz */
  hear(piece) {
    this.#session.send({ type: "input_audio_buffer.append", audio: pcm16(piece) });
  }

  /** The user has said all: answer it. */
  answer() {
    this.isHearing = false;
    this.isWaiting = true;
    this.#session.send({ type: "input_audio_buffer.commit" });
    this.#session.send({ type: "response.create" });
    this.#askedAt = performance.now();
  }

  /** Drop what the microphone heard. */
  unhear() {
    this.isHearing = false;
    this.#session.send({ type: "input_audio_buffer.clear" });
  }

  /** Cut the reply off, if one is given: what was heard of it stays. */
  stop() {
    const { reply } = this;
    if (!reply) {
      return;
    }
    this.reply = null;
    const heard = reply.stop();
    const { itemId, responseId } = reply;
    const view = this.#replyView(responseId);
    if (!reply.isComplete) {
      this.#session.send({ type: "response.cancel", response_id: responseId });
    }
    if (heard !== null && itemId) {
      const heardMs = Math.floor(heard * 1000);
      this.#session.send({
        type: "conversation.item.truncate",
        item_id: itemId,
        content_index: 0,
        audio_end_ms: heardMs,
      });
      this.#session.send({ type: "conversation.item.retrieve", item_id: itemId });
      view?.end(reply, 0, heardMs / 1000);
    } else {
      this.#conversation.keepWords(itemId, "assistant", reply.text);
      view?.end(reply, reply.text.length, heard);
    }
    this.#told.change();
  }

  /** Forget all. */
  reset() {
    this.#conversation = new Conversation();
    this.#views.clear();
    this.#session.close();
  }

  async #begin() {
    const configuration = await this.#session.open();
    this.findsTurns = configuration.audio.input.turn_detection !== null;
    this.#update();
    for (const item of this.#conversation.items) {
      this.#create(item);
    }
  }

  #update() {
    const { instructions, voice, isSpoken } = this.#settings;
    const input = { format: { type: "audio/pcm", rate: SPEECH_RATE }, transcription: {} };
    const audio = { input, output: voice ? { voice } : {} };
    const output_modalities = [isSpoken ? "audio" : "text"];
    this.#session.send({
      type: "session.update",
      session: { type: "realtime", instructions, output_modalities, audio },
    });
  }

  /** @param {{id: string, role: string, content: object[]}} item */
  #create(item) {
    this.#session.send({ type: "conversation.item.create", event_id: item.id, item: { type: "message", ...item } });
  }

  /** @param {{id: string, draft: Draft | null}} question */
  #wait(question) {
    this.#question = question;
    this.#askedAt = performance.now();
    this.isWaiting = true;
    this.#told.change();
  }

  /**
   * @param {string} id
   * @param {import("./log.js").View} view
   */
  #show(id, view) {
    this.#views.set(id, view);
  }

  /** @param {any} event of the session */
  #take(event) {
    /** @type {Record<string, () => void>} */
    const meaning = {
      "input_audio_buffer.speech_started": () => this.#userBegins(),
      "input_audio_buffer.speech_stopped": () => this.#userEnds(),
      "input_audio_buffer.committed": () => this.#userSpoke(event.item_id),
      "conversation.item.input_audio_transcription.completed": () => this.#heard(event.item_id, event.transcript),
      "conversation.item.added": () => this.#added(event.item.id),
      "conversation.item.retrieved": () => this.#cut(event.item),
      "conversation.item.deleted": () => this.#conversation.remove(event.item_id),
      "response.created": () => this.#replyBegins(event.response),
      "response.done": () => this.#replyEnds(event.response),
      error: () => this.#refused(event.error),
    };
    if (meaning[event.type]) {
      meaning[event.type]();
    } else if (this.reply && event.response_id === this.reply.responseId) {
      this.#follow(this.reply, event);
    }
  }

  #userBegins() {
    this.isHearing = true;
    this.stop();
    this.#told.hear();
    this.#told.change();
  }

  #userEnds() {
    this.isHearing = false;
    this.isWaiting = true; // what was said becomes an item at once
    this.#askedAt = performance.now();
    this.#told.change();
  }

  /** @param {string} id of what the user has said */
  #userSpoke(id) {
    this.#show(id, this.#log.ask("", [], true));
    this.#conversation.keepWords(id, "user", "");
    const askedAt = this.#askedAt;
    this.#wait({ id, draft: null });
    this.#askedAt = askedAt;
  }

  /**
   * @param {string} id
   * @param {string} words that were understood
   */
  #heard(id, words) {
    this.#conversation.keepWords(id, "user", words);
    this.#views.get(id)?.say(words);
  }

  /** @param {string} id of an item that the conversation now has */
  #added(id) {
    if (this.isWaiting && this.#question?.draft && this.#question.id === id) {
      this.#session.send({ type: "response.create" });
    }
  }

  /** @param {any} item a reply that was cut off, as far as it was heard */
  #cut({ id, content: [{ transcript }] }) {
    this.#conversation.keepWords(id, "assistant", transcript);
    this.#views.get(id)?.standBack(transcript.length);
  }

  /** @param {any} response */
  #replyBegins({ id, output_modalities: [modality] }) {
    this.isWaiting = false;
    this.reply = new Reply(id, modality === "audio" ? this.#player.begin() : null, this.#askedAt);
    this.#show(id, this.#log.reply());
    this.#told.change();
  }

  /**
   * @param {Reply} reply
   * @param {any} event
   */
  #follow(reply, { type, item, delta }) {
    if (type === "response.output_item.added") {
      reply.itemId = item.id;
      this.#show(item.id, /** @type {import("./log.js").View} */ (this.#views.get(reply.responseId)));
    } else if (type === "response.output_audio.delta") {
      reply.speak(delta);
    } else if (type === "response.output_audio_transcript.delta" || type === "response.output_text.delta") {
      reply.write(delta);
    }
    this.#replyView(reply.responseId)?.show(reply);
    this.#told.change();
  }

  /** @param {any} response */
  async #replyEnds({ id, status, status_details: details }) {
    const { reply } = this;
    if (!reply || reply.responseId !== id) {
      return;
    }
    if (status === "failed") {
      this.#takeBack(details.error.message);
      return;
    }
    await reply.complete();
    if (this.reply === reply) {
      this.reply = null;
      this.#conversation.keepWords(reply.itemId, "assistant", reply.text);
      this.#replyView(id)?.end(reply, reply.text.length, null);
      this.#told.change();
    }
  }

  /** @param {{message: string, code: string | null, event_id: string | null}} error */
  #refused({ message, code, event_id }) {
    if (event_id && event_id === this.#question?.id) {
      this.#takeBack(message);
    } else if (code !== PASSED) {
      this.isWaiting = false;
      this.#told.fail(new ApiError(message, 400), null);
      this.#told.change();
    }
  }

  /** @param {string} message why the question and its reply were as if they had not been */
  #takeBack(message) {
    const { reply } = this;
    this.reply = null;
    reply?.stop();
    this.isWaiting = false;
    const question = this.#question;
    this.#question = null;
    for (const id of [question?.id, reply?.itemId].filter((id) => id !== undefined && id !== "")) {
      this.#conversation.remove(/** @type {string} */ (id));
      this.#session.send({ type: "conversation.item.delete", item_id: id });
    }
    this.#log.remove(this.#views.get(question?.id ?? ""), this.#replyView(reply?.responseId ?? ""));
    this.#told.fail(new ApiError(message, 400), question?.draft ?? null);
    this.#told.change();
  }

  /** The session ended: what is under way ends, too. */
  #closed() {
    this.#opening = null;
    this.isHearing = false;
    const wasAsked = this.isWaiting || (this.reply !== null && !this.reply.isComplete);
    if (wasAsked) {
      this.#takeBack("The connection ended before the reply was complete.");
    } else {
      this.stop();
    }
    this.#told.close();
  }

  /** @param {string} responseId */
  #replyView(responseId) {
    return /** @type {import("./log.js").ReplyView | undefined} */ (this.#views.get(responseId));
  }
}
