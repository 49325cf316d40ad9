// The box at the foot of the page: writing, attaching pictures, thinking or not, sending, stopping.

import { byId, element, fitHeight, icon, isSendKey } from "./dom.js";
import { imageFiles, readImage } from "./images.js";
import { settings } from "./store.js";
import { label, say } from "./texts.js";

const THINKING = { default: null, on: true, off: false };

export class Composer {
  #images = []; // data URLs
  #maxImages = null; // null until the server has said it
  #ready = true;
  #running = false;

  constructor({ onSend, onStop, numImagesBefore }) {
    this.onSend = onSend;
    this.numImagesBefore = numImagesBefore;
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", onStop);
    this.prompt.addEventListener("input", () => this.#refresh());
    this.prompt.addEventListener("keydown", (event) => this.#onKey(event, onStop));
    byId("thinking").addEventListener("change", ({ target }) => {
      settings.write({ ...settings.read(), thinking: THINKING[target.value] });
    });
    this.#listenForImages();
    this.showThinking();
    this.#refresh();
  }

  /** Whether the model shall think; null for the server's default, or where there is no choice. */
  get thinking() {
    return byId("thinking").hidden ? null : THINKING[byId("thinking").value];
  }

  showThinking() {
    const { thinking } = settings.read();
    byId("thinking").value = Object.keys(THINKING).find((name) => THINKING[name] === thinking);
  }

  /** A server that doesn't answer leaves open whether thinking can be switched. */
  setServer({ ready, maxImages, switchesThinking = !byId("thinking").hidden }) {
    byId("thinking").hidden = !switchesThinking;
    this.#ready = ready;
    this.#maxImages = maxImages;
    this.#refresh();
  }

  setRunning(running) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    this.#running = running;
    this.#refresh();
    if (hadFocus) this.prompt.focus();
  }

  #onKey(event, onStop) {
    if (event.key === "Escape" && this.#running) onStop();
    if (!isSendKey(event)) return;
    event.preventDefault();
    this.#send();
  }

  get #maySend() {
    const hasContent = this.prompt.value.trim() !== "" || this.#images.length > 0;
    return hasContent && this.#ready && !this.#running;
  }

  #send() {
    if (!this.#maySend) return;
    const text = this.prompt.value.trim();
    const images = this.#images;
    this.prompt.value = "";
    this.#images = [];
    this.#refresh();
    this.onSend(text, images);
  }

  #refresh() {
    byId("send").hidden = this.#running;
    byId("send").disabled = !this.#maySend;
    byId("stop").hidden = !this.#running;
    byId("attach").hidden = this.#maxImages === 0;
    fitHeight(this.prompt);
    this.#showImages();
  }

  #showImages() {
    const list = byId("attached");
    list.hidden = this.#images.length === 0;
    list.replaceChildren(...this.#images.map((source, index) => {
      const remove = element("button", { class: "remove", type: "button" }, icon("close"));
      remove.addEventListener("click", () => this.#remove(index));
      const picture = label(element("img", { src: source, alt: "" }), "attachedImage", { number: index + 1 });
      return element("li", {}, picture, label(remove, "removeImage"));
    }));
  }

  #remove(index) {
    this.#images = this.#images.filter((_, other) => other !== index);
    byId("notice").textContent = "";
    this.#refresh();
    this.prompt.focus();
  }

  #listenForImages() {
    const input = byId("files");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.#add([...input.files]);
      input.value = "";
    });
    this.prompt.addEventListener("paste", (event) => {
      const files = imageFiles(event.clipboardData);
      if (!files.length) return;
      event.preventDefault();
      this.#add(files);
    });
    const isFile = (event) => event.dataTransfer?.types.includes("Files");
    // Over the whole page: a file dropped beside the box must not open in its place.
    document.addEventListener("dragover", (event) => {
      if (!isFile(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) document.body.classList.remove("dropping");
    });
    document.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!isFile(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  async #add(files) {
    const notice = byId("notice");
    notice.textContent = "";
    delete notice.dataset.text;
    for (const file of files) {
      if (this.#maxImages === 0) return say(notice, "noImages");
      const number = this.numImagesBefore() + this.#images.length;
      if (this.#maxImages !== null && number >= this.#maxImages) {
        return say(notice, "tooManyImages", { images: this.#maxImages });
      }
      try {
        this.#images = [...this.#images, await readImage(file)];
      } catch {
        say(notice, "notAnImage", { name: file.name });
      }
      this.#refresh();
    }
    this.prompt.focus();
  }
}
