// What went wrong, in the reader's words: a title, more about it, and when to try again.

import { element } from "./dom.js";
import { say } from "./texts.js";

/** The names of the texts for an `ApiError`; `detail` is what the server said itself. */
export function explain(fault) {
  const detail = fault.message;
  if (fault.code === "cut_off") return { title: "brokeOff", more: "brokeOffMore" };
  if (fault.status === 0) return { title: "unreachable", more: "unreachableMore" };
  if (fault.status === 200) return { title: "brokeOff", detail };
  if (fault.status === 401) return { title: "keyNeeded", detail };
  if (fault.status === 429) return { title: "queueFull", more: "queueFullMore", detail };
  if (fault.status === 503) return { title: "notReady", detail };
  if (fault.code === "context_length_exceeded") {
    return { title: "tooLong", more: "tooLongMore", detail };
  }
  return { title: "refused", detail };
}

/** A card with a button; the button waits as long as the server asked. */
export function troubleCard(fault, retry) {
  const { title, more, detail } = explain(fault);
  const button = element("button", { class: "plain", type: "button" });
  button.addEventListener("click", retry);
  countDown(button, fault.retrySeconds ?? 0);
  return element(
    "div",
    { class: "trouble" },
    element(
      "div",
      { role: "alert" }, // not around the button: its seconds would be read out, one by one
      say(element("strong"), title),
      more ? say(element("p"), more) : null,
      detail ? element("p", { class: "detail" }, detail) : null,
    ),
    button,
  );
}

function countDown(button, seconds) {
  const end = performance.now() + seconds * 1000;
  const tick = () => {
    const left = Math.ceil((end - performance.now()) / 1000);
    button.disabled = left > 0;
    if (left > 0) say(button, "retryIn", { seconds: left });
    else say(button, "retry");
    if (left > 0) setTimeout(() => button.isConnected && tick(), 250);
  };
  tick();
}
