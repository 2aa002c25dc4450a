// SPDX-License-Identifier: Apache-2.0
/** The camera: its button shows what it sees, and each question has a picture of it. */

import { byId } from "./dom.js";
import { pictureOf } from "./media.js";

export class Camera {
  #button = byId("camera", HTMLButtonElement);
  #mirror = byId("mirror", HTMLVideoElement);
  /** @type {MediaStream | null} */
  #stream = null;

  /** @param {(message: string) => void} fail there is no camera to look through */
  constructor(fail) {
    this.#button.hidden = !(window.isSecureContext && "mediaDevices" in navigator);
    this.#button.addEventListener("click", () => (this.#stream ? this.close() : this.#open(fail)));
  }

  /** A picture of what it sees now. @returns {import("./media.js").Part[]} nothing while it is off */
  see() {
    const { videoWidth, videoHeight } = this.#mirror;
    return this.#stream && videoWidth
      ? [{ type: "input_image", image_url: pictureOf(this.#mirror, videoWidth, videoHeight) }]
      : [];
  }

  /** Let the camera go. */
  close() {
    for (const track of this.#stream?.getTracks() ?? []) {
      track.stop();
    }
    this.#show(null);
  }

  /** @param {(message: string) => void} fail */
  async #open(fail) {
    this.#button.disabled = true;
    try {
      this.#show(await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } }));
      await this.#mirror.play();
    } catch (error) {
      const { message, name } = /** @type {Error} */ (error);
      fail(`The camera cannot be used: ${message || name}.`);
    } finally {
      this.#button.disabled = false;
    }
  }

  /** @param {MediaStream | null} stream */
  #show(stream) {
    this.#stream = stream;
    this.#mirror.srcObject = stream;
    this.#mirror.hidden = stream === null;
    this.#button.ariaPressed = String(stream !== null);
  }
}
