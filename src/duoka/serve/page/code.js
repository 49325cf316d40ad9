// Blocks of code: the language, a button to copy, and colors.

import hljs from "./highlight.min.js";
import { copyButton, element } from "./dom.js";

const purify = window.DOMPurify(window);
const CLEAN = {
  ALLOWED_TAGS: ["span"],
  ALLOWED_ATTR: ["class"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const MAX_COLORED_CHARACTERS = 50000;

/** A `<pre>` of Markdown in a frame; with colors where its language is known. */
export function codeBlock(pre, isFinished) {
  const code = pre.querySelector("code");
  const language = code?.className.replace("language-", "") ?? "";
  const copy = copyButton(() => pre.textContent.replace(/\n$/, ""));
  const top = element("div", { class: "code-top" }, element("span", {}, language), copy);
  if (isFinished && code) color(code, language);
  pre.tabIndex = 0;
  return element("div", { class: "code" }, top, pre);
}

function color(code, language) {
  const source = code.textContent;
  if (!hljs.getLanguage(language) || source.length > MAX_COLORED_CHARACTERS) return;
  const { value } = hljs.highlight(source, { language, ignoreIllegals: true });
  const colored = purify.sanitize(value, CLEAN);
  // A class of the page's own would let code look like a part of the page.
  for (const part of colored.querySelectorAll(":not([class^='hljs-'])")) part.removeAttribute("class");
  // The text is what will be copied: rather no colors than another one.
  if (colored.textContent === source) code.replaceChildren(colored);
}
