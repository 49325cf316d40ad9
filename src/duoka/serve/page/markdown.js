// A model's Markdown, shown as it streams in. What a model writes is hostile: HTML in it is shown
// as text, and what Markdown makes of the rest is cleaned before it reaches the page. The server's
// Content-Security-Policy is the third wall, and stands alone if both of these fall.

import { Marked } from "./marked.esm.js";
import { codeBlock } from "./code.js";
import { element } from "./dom.js";
import { drawFormulas, formulas } from "./formulas.js";

const purify = window.DOMPurify;

const CLEAN = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "img",
    "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "alt", "class", "href", "src", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // or they would be held against the addresses below
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  // No relative addresses: an answer has no business with this server's own paths. Pictures may
  // be data URLs besides, which DOMPurify knows apart.
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

purify.addHook("afterSanitizeAttributes", (node) => {
  // A class of the page's own would let an answer look like a part of the page.
  if (!/^(language-[\w+#.-]+|math)$/.test(node.className) || node.tagName !== "CODE") {
    node.removeAttribute("class");
  }
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked(formulas, {
  gfm: true,
  renderer: {
    // Models break lines in tables this way, and no other.
    html: ({ text }) => (/^<br\s*\/?>\s*$/i.test(text) ? "<br>" : escape(text)),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // Loading a picture from elsewhere would tell elsewhere: a link, for the reader to decide.
    image({ href, text, title }) {
      if (/^data:image\//i.test(href)) {
        return `<img src="${escape(href)}" alt="${escape(text)}" title="${escape(title ?? "")}">`;
      }
      return `<a href="${escape(href)}">${escape(text || href)}</a>`;
    },
  },
});

/** Shows growing Markdown in `root`: only blocks that changed, or ended, are made anew. */
export class MarkdownView {
  #root;
  #sources = []; // the Markdown of each child of root, and whether it had ended

  constructor(root) {
    this.#root = root;
  }

  update(source, streaming = true) {
    try {
      this.#updateBlocks(marked.lexer(source, { ...marked.defaults, streaming }), streaming);
    } catch (fault) {
      // Nested deeper than the parser's stack, most likely.
      console.error(fault);
      this.#sources = [];
      this.#root.replaceChildren(element("p", { class: "as-text" }, source));
    }
  }

  /** Once more from the start: a link's address may have come long after the link. */
  finish(source) {
    this.#sources = [];
    this.#root.replaceChildren();
    this.update(source, false);
  }

  #updateBlocks(tokens, streaming) {
    const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    for (const [index, token] of blocks.entries()) {
      // Colors for code that still grows would be computed anew with every word.
      const isFinished = !streaming || index < blocks.length - 1;
      const source = `${isFinished} ${token.raw}`;
      if (this.#sources[index] === source) continue;
      const node = renderBlock(token, isFinished);
      if (index < this.#root.children.length) this.#root.children[index].replaceWith(node);
      else this.#root.append(node);
      this.#sources[index] = source;
    }
    while (this.#root.children.length > blocks.length) this.#root.lastChild.remove();
    this.#sources.length = blocks.length;
  }
}

function renderBlock(token, isFinished) {
  const content = purify.sanitize(marked.parser([token]), CLEAN);
  for (const pre of content.querySelectorAll("pre")) wrap(pre, (node) => codeBlock(node, isFinished));
  for (const table of content.querySelectorAll("table")) wrap(table, scroller);
  drawFormulas(content);
  return element("div", { class: "block" }, content);
}

function wrap(node, make) {
  const place = document.createComment("");
  node.replaceWith(place);
  place.replaceWith(make(node));
}

// What scrolls must be within the keyboard's reach.
const scroller = (node) => element("div", { class: "scroller", tabindex: "0" }, node);
