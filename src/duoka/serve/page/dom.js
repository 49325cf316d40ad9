// The few lines that a framework would have been used for.

import { label, say } from "./texts.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text becomes text, never markup. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
}

export function icon(name) {
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** A button of one icon, named in the reader's language. */
export function toolButton(iconName, textName, onclick) {
  const node = element("button", { class: "tool", type: "button" }, icon(iconName));
  node.addEventListener("click", onclick);
  return label(node, textName);
}

/** A button of words. */
export function wordButton(textName, look, onclick) {
  const node = element("button", { class: look, type: "button" });
  node.addEventListener("click", onclick);
  return say(node, textName);
}

const isTouched = () => matchMedia("(hover: none) and (pointer: coarse)").matches;

/** True for an Enter that sends what is written in a box of several lines. */
export function isSendKey(event) {
  // An Enter that ends the choice of a Chinese character sends nothing (229 is how Safari says
  // so); on a phone's keyboard it is the only way to a new line.
  const composing = event.isComposing || event.keyCode === 229;
  return event.key === "Enter" && !event.shiftKey && !composing && !isTouched();
}

/** Makes a box as high as what is written in it. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** Puts the cursor into the message box; not on a phone, where that brings up the keyboard. */
export function focusPrompt() {
  if (!isTouched()) byId("prompt").focus();
}

export const byId = (id) => document.getElementById(id);

/** Copies text, on pages without https too, where browsers have no clipboard for scripts. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser refused to copy");
}

/** A button that copies what `source()` says, and shows that it has. */
export function copyButton(source) {
  const node = toolButton("copy", "copy", async () => {
    const copied = await copy(source()).then(() => true, () => false);
    show(copied ? "done" : "close", copied ? "copied" : "notCopied");
    setTimeout(() => show("copy", "copy"), 1500);
  });
  function show(iconName, textName) {
    node.replaceChildren(icon(iconName));
    label(node, textName);
  }
  return node;
}
