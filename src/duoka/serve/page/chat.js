// The conversation: what is asked, what comes back, stopping, asking again or something else.

import { ApiError, streamChat } from "./api.js";
import { conversation, settings } from "./store.js";
import { byId, focusPrompt } from "./dom.js";
import { say } from "./texts.js";
import { TurnView } from "./turn.js";

const NEAR_PIXELS = 60;

export class Chat {
  #turns = conversation.read();
  #views = [];
  #root = byId("messages");
  #height = this.#root.clientHeight;
  #stopper = null;
  #atEnd = true;

  /** `askForKey()` resolves to whether there is a new key; `onState(running)` follows a run. */
  constructor({ model, thinking, askForKey, onState }) {
    this.model = model;
    this.thinking = thinking;
    this.askForKey = askForKey;
    this.onState = onState;
    for (const turn of this.#turns) {
      this.#addView(turn).showEnd(turn.end === null ? new ApiError(0, { code: "cut_off" }) : null);
    }
    this.#root.addEventListener("scroll", () => this.#noteScroll());
    // The box at the foot grows with what is written in it.
    new ResizeObserver(() => this.#noteSize()).observe(this.#root);
    byId("newest").addEventListener("click", () => this.scrollToEnd());
    this.#show();
  }

  get running() {
    return this.#stopper !== null;
  }

  get numImages() {
    return this.#turns.reduce((sum, turn) => sum + turn.images.length, 0);
  }

  send(text, images) {
    const turn = { text, images, ...unanswered() };
    this.#turns.push(turn);
    const view = this.#addView(turn);
    this.#show();
    this.#atEnd = true;
    return this.#run(turn, view);
  }

  stop() {
    this.#stopper?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    for (const view of this.#views) view.node.remove();
    this.#views = [];
    conversation.write([]);
    this.#show();
  }

  scrollToEnd() {
    this.#root.scrollTop = this.#root.scrollHeight;
    this.#noteScroll();
  }

  #addView(turn) {
    const view = new TurnView(turn, (text) => this.#askAgain(turn, view, text));
    this.#views.push(view);
    this.#root.append(view.node);
    return view;
  }

  #show() {
    byId("welcome").hidden = this.#turns.length > 0;
    this.#showViews();
    this.#noteScroll();
  }

  #showViews() {
    for (const view of this.#views) {
      view.showPlace({ isLast: view === this.#views.at(-1), isBusy: this.running });
    }
  }

  #noteSize() {
    this.#height = this.#root.clientHeight;
    if (this.#atEnd) this.scrollToEnd();
    else this.#noteScroll();
  }

  #noteScroll() {
    // Moved by a new size, not by the reader: where they want to be hasn't changed.
    if (this.#root.clientHeight !== this.#height) return;
    const below = this.#root.scrollHeight - this.#root.scrollTop - this.#root.clientHeight;
    this.#atEnd = below < NEAR_PIXELS;
    byId("newest").hidden = this.#atEnd;
  }

  /** Asks a question again, or another in its place; what follows it is removed. */
  #askAgain(turn, view, text = turn.text) {
    const number = this.#turns.indexOf(turn) + 1;
    if (this.running || number === 0) return;
    this.#turns.length = number;
    for (const later of this.#views.splice(number)) later.node.remove();
    Object.assign(turn, { text }, unanswered());
    view.showQuestion();
    this.#atEnd = true;
    focusPrompt(); // the button that was pressed is gone
    this.#run(turn, view);
  }

  async #run(turn, view) {
    const stopper = new AbortController();
    this.#stopper = stopper;
    this.#showViews();
    this.onState(true);
    conversation.write(this.#turns); // the question, should the page be left before the answer
    let fault = null;
    try {
      await this.#receive(turn, view, stopper.signal);
    } catch (error) {
      if (stopper.signal.aborted) turn.end = "stopped";
      else fault = error;
    }
    this.#stopper = null;
    // Cleared meanwhile: the turn is no more.
    if (this.#turns.includes(turn)) this.#end(turn, view, fault);
    this.#showViews();
    this.onState(false);
    if (fault?.status === 401 && (await this.askForKey())) this.#askAgain(turn, view);
  }

  async #receive(turn, view, signal) {
    const paint = this.#painter(view);
    paint();
    let [firstTime, lastTime] = [null, null];
    try {
      for await (const chunk of streamChat(this.#body(), signal)) {
        if (!take(turn, chunk)) continue;
        if (firstTime === null) say(byId("spoken"), "answerBegins");
        lastTime = performance.now();
        firstTime ??= lastTime;
        paint();
      }
    } finally {
      paint.cancel();
    }
    // After the first token, whose time is the prompt's.
    if (lastTime > firstTime) turn.speed = ((turn.tokens - 1) * 1000) / (lastTime - firstTime);
    turn.end ??= "stop";
  }

  /** Paints at most once a frame, however fast the tokens come. */
  #painter(view) {
    let frame = null;
    const draw = () => {
      frame = null;
      view.showProgress();
      if (this.#atEnd) this.scrollToEnd();
      else this.#noteScroll();
    };
    const paint = () => {
      frame ??= requestAnimationFrame(draw);
    };
    paint.cancel = () => cancelAnimationFrame(frame);
    return paint;
  }

  #end(turn, view, fault) {
    const follow = this.#atEnd;
    view.showEnd(fault);
    if (follow) this.scrollToEnd();
    if (!fault) say(byId("spoken"), turn.end === "stopped" ? "stopped" : "answerEnded");
    conversation.write(this.#turns);
  }

  #body() {
    const { system, temperature, maxTokens } = settings.read();
    const body = { model: this.model(), messages: toMessages(system, this.#turns) };
    if (temperature !== null) body.temperature = temperature;
    if (maxTokens !== null) body.max_tokens = maxTokens;
    const thinking = this.thinking();
    if (thinking !== null) body.chat_template_kwargs = { enable_thinking: thinking };
    return body;
  }
}

const unanswered = () => ({ answer: "", reasoning: "", end: null, tokens: null, speed: null });

/** Puts what a chunk says into the turn; whether there is anything new to see. */
function take(turn, chunk) {
  if (chunk.usage) turn.tokens = chunk.usage.completion_tokens;
  const choice = chunk.choices?.[0];
  if (choice?.finish_reason) turn.end = choice.finish_reason;
  const { content, reasoning_content: reasoning } = choice?.delta ?? {};
  turn.answer += content ?? "";
  turn.reasoning += reasoning ?? "";
  return Boolean(content || reasoning);
}

/** Questions without an answer are left out, but for the last: templates want strict turns. */
function toMessages(system, turns) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const isLast = turn === turns.at(-1);
    if (turn.answer === "" && !isLast) continue;
    messages.push({ role: "user", content: toContent(turn) });
    if (!isLast) messages.push({ role: "assistant", content: turn.answer });
  }
  return messages;
}

function toContent({ text, images }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}
