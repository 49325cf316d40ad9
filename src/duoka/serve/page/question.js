// A question on the page, which can be edited and asked again.

import { element, fitHeight, isSendKey, toolButton, wordButton } from "./dom.js";
import { label, say } from "./texts.js";

export class QuestionView {
  #turn;
  #ask;
  #isBusy = false;
  #editor = null; // the box, while it is edited

  /** `ask(text)` is called with what the question was changed to. */
  constructor(turn, ask) {
    this.#turn = turn;
    this.#ask = ask;
    this.root = element("article", { class: "question" });
    this.editButton = toolButton("edit", "edit", () => this.#edit());
    this.foot = element("div", { class: "question-foot" }, this.editButton);
    this.warning = say(element("p", { class: "quiet" }), "editMore");
    this.sendButton = wordButton("send", "main", () => this.#send());
    this.nodes = [this.root, this.foot];
    this.show();
  }

  show() {
    const { text } = this.#turn;
    this.#editor = null;
    this.foot.hidden = false;
    this.root.classList.remove("editing");
    this.#fill(text ? element("p", { class: "as-text" }, text) : null);
  }

  showPlace({ isLast, isBusy }) {
    this.#isBusy = isBusy;
    this.editButton.disabled = isBusy;
    this.warning.hidden = isLast;
    this.#refresh();
  }

  #fill(...content) {
    const title = say(element("h3", { class: "hidden" }), "you");
    const nodes = [title, pictures(this.#turn.images), ...content];
    this.root.replaceChildren(...nodes.filter((node) => node !== null));
  }

  #edit() {
    const editor = label(element("textarea", { rows: "1" }), "edit");
    editor.value = this.#turn.text;
    editor.addEventListener("input", () => this.#refresh());
    editor.addEventListener("keydown", (event) => this.#onKey(event));
    const cancel = wordButton("cancel", "plain", () => this.#cancel());
    this.#editor = editor;
    this.foot.hidden = true;
    this.root.classList.add("editing");
    this.#fill(editor, this.warning, element("div", { class: "buttons" }, cancel, this.sendButton));
    this.#refresh();
    editor.focus();
  }

  #onKey(event) {
    if (event.key === "Escape" && !event.isComposing) this.#cancel();
    if (!isSendKey(event)) return;
    event.preventDefault();
    this.#send();
  }

  #cancel() {
    this.show();
    this.editButton.focus();
  }

  get #maySend() {
    const hasContent = this.#editor.value.trim() !== "" || this.#turn.images.length > 0;
    return hasContent && !this.#isBusy;
  }

  #send() {
    if (this.#maySend) this.#ask(this.#editor.value.trim());
  }

  #refresh() {
    if (!this.#editor) return;
    this.sendButton.disabled = !this.#maySend;
    fitHeight(this.#editor);
  }
}

function pictures(images) {
  if (!images.length) return null;
  const nodes = images.map((source, index) =>
    label(element("img", { src: source, alt: "" }), "attachedImage", { number: index + 1 }));
  return element("div", { class: "pictures" }, ...nodes);
}
