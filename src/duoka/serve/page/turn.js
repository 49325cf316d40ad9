// One turn of a conversation on the page: a question, and its answer as it comes.

import { copyButton, element, toolButton } from "./dom.js";
import { QuestionView } from "./question.js";
import { MarkdownView } from "./markdown.js";
import { formatNumber, label, say } from "./texts.js";
import { troubleCard } from "./trouble.js";

export class TurnView {
  /**
   * A turn is `{text, images, answer, reasoning, end, tokens, speed}`; the last three are null
   * until they are known. `ask(text)` asks again: the question, or this text in its place.
   */
  constructor(turn, ask) {
    this.turn = turn;
    this.retry = () => ask();
    this.questionView = new QuestionView(turn, ask);
    this.answerRoot = element("div", { class: "markdown" });
    this.answerView = new MarkdownView(this.answerRoot);
    this.reasoningRoot = element("div", { class: "markdown" });
    this.reasoningView = new MarkdownView(this.reasoningRoot);
    this.summary = element("summary");
    this.reasoning = element("details", { class: "reasoning", hidden: true }, this.summary, this.reasoningRoot);
    this.wait = label(element("div", { class: "wait", role: "img", hidden: true }), "waitingForAnswer");
    this.wait.append(element("i"), element("i"), element("i"));
    this.trouble = element("div");
    this.meta = element("span", { class: "meta" });
    this.regenerate = toolButton("retry", "regenerate", this.retry);
    this.foot = element(
      "div",
      { class: "turn-foot", hidden: true },
      copyButton(() => this.turn.answer),
      this.regenerate,
      this.meta,
    );
    this.node = element("div", { class: "turn" }, ...this.questionView.nodes, this.#answerNode());
  }

  #answerNode() {
    return element(
      "article",
      { class: "answer" },
      this.reasoning, this.answerRoot, this.wait, this.trouble, this.foot,
    );
  }

  showQuestion() {
    this.questionView.show();
  }

  /** While an answer comes, to any question, nothing else can be asked. */
  showPlace({ isLast, isBusy }) {
    this.node.classList.toggle("last", isLast);
    this.regenerate.disabled = isBusy;
    label(this.regenerate, isLast ? "regenerate" : "regenerateHere");
    this.questionView.showPlace({ isLast, isBusy });
  }

  /** While the answer comes. */
  showProgress() {
    const { answer, reasoning } = this.turn;
    this.trouble.replaceChildren();
    this.foot.hidden = true;
    this.wait.hidden = answer !== "" || reasoning !== "";
    this.#showReasoning(answer === "");
    this.answerView.update(answer);
  }

  /** When it has ended: whole, stopped, or with a fault. */
  showEnd(fault = null) {
    const { answer, reasoning } = this.turn;
    this.wait.hidden = true;
    this.#showReasoning(false);
    this.reasoningView.finish(reasoning);
    this.answerView.finish(answer);
    this.trouble.replaceChildren(...(fault ? [troubleCard(fault, this.retry)] : []));
    this.foot.hidden = fault !== null && answer === "";
    this.node.classList.toggle("faulty", fault !== null);
    this.#showMeta();
  }

  /** Opened while it is all there is, unless the reader has decided otherwise. */
  #showReasoning(underWay) {
    const { reasoning } = this.turn;
    this.reasoning.hidden = reasoning === "";
    if (reasoning === "") return;
    if (this.underWay !== underWay) {
      this.reasoning.open = underWay;
      say(this.summary, underWay ? "thinking" : "reasoning");
      this.underWay = underWay;
    }
    this.reasoningView.update(reasoning);
  }

  #showMeta() {
    const { tokens, speed, end } = this.turn;
    const parts = [];
    if (end === "length") parts.push(say(element("span"), "tokenLimit"));
    if (end === "stopped") parts.push(say(element("span"), "stopped"));
    if (tokens !== null) {
      const values = { tokens: formatNumber(tokens), speed: speed && formatNumber(speed, 1) };
      parts.push(say(element("span"), speed ? "usageWithSpeed" : "usage", values));
    }
    this.meta.replaceChildren(...parts);
  }
}
