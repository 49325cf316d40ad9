// TeX formulas in Markdown: $…$, \(…\) in a line, $$…$$, \[…\] on lines of their own, as MathML.
// The Markdown has formulas as <code class="math">; KaTeX makes MathML of these after the Markdown
// was cleaned. That is cleaned apart, so that MathML and HTML, together hard to clean, never meet.

import { element } from "./dom.js";

const { katex } = window;
const purify = window.DOMPurify(window);

const CLEAN = {
  ALLOWED_TAGS: [
    "math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow",
    "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr",
    "munder", "munderover",
  ],
  ALLOWED_ATTR: [
    "accent", "accentunder", "class", "columnalign", "columnlines", "columnspacing", "depth",
    "display", "displaystyle", "fence", "height", "largeop", "linethickness", "lspace",
    "mathbackground", "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "notation",
    "rowlines", "rspace", "scriptlevel", "separator", "stretchy", "voffset", "width",
  ],
  ADD_FORBID_CONTENTS: ["annotation"], // the TeX once more
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  PARSER_MEDIA_TYPE: "application/xhtml+xml", // in HTML, <mo> could have no elements in it
  RETURN_DOM_FRAGMENT: true,
};
const TEX = {
  output: "mathml", // drawn by the browser, without fonts and style sheets
  strict: false, // Chinese in a formula is no reason to complain
  maxSize: 20, // em; what a model writes must not cover the page
};
const MAX_CHARACTERS = 10000;
const MAX_CACHED = 2000;

// Formulas have no backticks: what looks like a formula around code is none. A backslash and the
// sign after it are one, so that neither `\$` nor the bracket of `\\]` ends anything.
const CLOSED = [
  /\$\$(?:\\[^`]|\$(?!\$)|[^\\`$]){1,5000}?\$\$/,
  /\\\((?:\\[^`)]|[^\\`]){1,5000}?\\\)/,
  /\\\[(?:\\[^`\]]|[^\\`]){1,5000}?\\\]/,
].map((form) => form.source).join("|");
const SINGLE = [
  /\$(?![\s$])(?:\\[^\n`]|[^\\\n`$]){0,1000}?(?:\\[^\s`]|[^\s\\`$])\$/,
  /\$ (?:\\[^\n`]|[^\\\n`$]){1,1000}? \$/,
].map((form) => form.source).join("|");
const INLINE = new RegExp(`^(?:${CLOSED}|${SINGLE})`);
const BLOCK = new RegExp(`^ {0,3}(${CLOSED})[^\\S\\n]*([.,;:!?。，；：！？]?)[^\\S\\n]*(\\n+|$)?`);
const EVERY = new RegExp(`(?<!\\\\)(?:${CLOSED}|${SINGLE})`, "g");
const OPENED = /^(?:\$\$|\\[([])[^`]*$/;
const BLOCK_OPENED = /^ {0,3}(?:\$\$|\\\[)[^`]*$/;
const START = /(?<![\w\\$])\$|(?<!\\)\$(?=\\[a-z])|\\[([]/i;
const BLOCK_START = /\n {0,3}(?:(\$\$|\\\[)|[^\S\n]*\n)/;

/** Sums of money and names of variables between dollar signs are no formulas. */
function isProse(source, after) {
  if (!/^\$[^$]/.test(source) || /[\\^_{}=]/.test(source)) return false;
  if (source.startsWith("$ ")) return !/^\$ [a-z] \$$/i.test(source);
  return /^[\dA-Z_]/.test(after) || /^\$\d.*([a-z]{2}|[一-鿿])/i.test(source);
}

function readInline(source) {
  const raw = INLINE.exec(source)?.[0];
  if (raw && !isProse(raw, source.slice(raw.length))) return { type: "formula", raw, source: raw };
  // One that is still being written must not become something else meanwhile.
  const isOpen = !raw && this.lexer.options.streaming && OPENED.test(source);
  return isOpen ? { type: "text", raw: source, text: source } : undefined;
}

function readBlock(source) {
  const [raw, formula, mark, end] = BLOCK.exec(source) ?? [];
  const isBlock = raw && !formula.startsWith("\\(") && (end !== undefined || formula.includes("\n"));
  if (isBlock) return { type: "formulaBlock", raw, source: formula, mark };
  if (raw || !this.lexer.options.streaming || !BLOCK_OPENED.test(source)) return undefined;
  return {
    type: "paragraph", raw: source, text: source, tokens: [{ type: "text", raw: source, text: source }],
  };
}

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const placeholder = (source) => `<code class="math">${escape(source)}</code>`;

/** For marked; with its option `streaming`, unfinished formulas are text as they were written. */
export const formulas = {
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (source) => START.exec(source)?.index,
      tokenizer: readInline,
      renderer: ({ source }) => placeholder(source),
    },
    {
      name: "formulaBlock",
      level: "block",
      // As far as the paragraph goes that a formula would end.
      start(source) {
        const match = BLOCK_START.exec(source);
        return match?.[1] ? match.index + 1 : undefined;
      },
      tokenizer: readBlock,
      renderer: ({ source, mark }) => `<p>${placeholder(source)}${mark}</p>`,
    },
  ],
  hooks: {
    // Asterisks and underscores in formulas are no emphasis.
    emStrongMask: (source) => source.replace(EVERY, (match) => "a".repeat(match.length)),
  },
};

/** Puts formulas in the place of `<code class="math">`; what KaTeX can't read stays text. */
export function drawFormulas(root) {
  for (const code of root.querySelectorAll("code.math")) {
    const source = code.textContent;
    const drawn = cached(source);
    const kind = isDisplay(source) ? "formula display" : "formula";
    code.replaceWith(drawn ? element("span", { class: kind }, drawn) : source);
  }
}

const isDisplay = (source) => source.startsWith("$$") || source.startsWith("\\[");

const cache = new Map(); // source: MathML, or null; a growing list is drawn every frame

function cached(source) {
  if (!cache.has(source)) {
    if (cache.size >= MAX_CACHED) cache.delete(cache.keys().next().value);
    cache.set(source, draw(source));
  }
  return cache.get(source)?.cloneNode(true) ?? null;
}

function draw(source) {
  const margin = /^\$[^$]/.test(source) ? 1 : 2;
  const tex = source.slice(margin, -margin);
  if (tex.length > MAX_CHARACTERS) return null;
  try {
    const markup = katex.renderToString(tex, { ...TEX, displayMode: isDisplay(source) });
    // The policy complains of styles before they are cleaned.
    const plain = markup.replace(/ style="[^"]*"/g, "");
    const math = purify.sanitize(plain, CLEAN).querySelector("math");
    math.querySelectorAll("mtable").forEach(arrangeTable);
    math.querySelectorAll("[mathvariant]").forEach(changeLetters);
    math.querySelectorAll("mover, munder").forEach(drawBar);
    math.querySelectorAll("mo:is([fence], [stretchy='false'])").forEach(changeBar);
    math.querySelectorAll(":is(mi, mo, mn, mtext):has(*)").forEach(makeRow);
    math.querySelectorAll("mpadded[width^='+']").forEach(markPadding);
    for (const node of math.querySelectorAll("[class]")) node.removeAttribute("class");
    return math;
  } catch {
    return null;
  }
}

/** Says each cell how it is aligned and lined: Chromium doesn't read it off the table. */
function arrangeTable(table) {
  const [aligns, columnLines, rowLines] = ["columnalign", "columnlines", "rowlines"].map(
    (name) => (table.getAttribute(name) ?? "").split(" "),
  );
  for (const [number, row] of [...table.children].entries()) {
    if (isLine(rowLines[number])) row.setAttribute("data-below", rowLines[number]);
    const cells = [...row.children].filter((cell) => !cell.hasAttribute("class"));
    for (const [column, cell] of cells.entries()) {
      cell.setAttribute("data-align", aligns[column] || "center");
      if (isLine(columnLines[column])) cell.setAttribute("data-beside", columnLines[column]);
    }
  }
}

const isLine = (kind) => kind === "solid" || kind === "dashed";

/** Makes a border of a bar over or under a term, which few fonts can stretch. */
function drawBar(node) {
  const [term, sign] = node.children;
  if (sign?.textContent !== "\u203e" || sign.getAttribute("stretchy") !== "true") return;
  const bar = document.createElementNS(node.namespaceURI, "menclose");
  bar.setAttribute("notation", node.localName === "mover" ? "top" : "bottom");
  bar.append(term);
  node.replaceWith(bar);
}

const FENCES = { "\u2223": "|", "\u2225": "\u2016" };

/** Writes bars around a term with the signs for that, which browsers and fonts can stretch. */
function changeBar(node) {
  if (!(node.textContent in FENCES)) return;
  node.textContent = FENCES[node.textContent];
  if (node.hasAttribute("fence")) node.setAttribute("stretchy", "true");
  for (const side of ["lspace", "rspace"]) node.setAttribute(side, "0");
}

/** Makes a row of a sign that is made of others, as in \stackrel: Chromium draws none of them. */
function makeRow(node) {
  const row = document.createElementNS(node.namespaceURI, "mrow");
  row.append(...node.childNodes);
  node.replaceWith(row);
}

/** Leaves to the style sheet what is to be added to a width, which Chromium doesn't. */
function markPadding(node) {
  for (const name of ["width", "height", "lspace", "voffset"]) node.removeAttribute(name);
  node.setAttribute("data-padded", "");
}

// The first letters of alphabets that Chromium doesn't make of plain ones, and those that Unicode
// has elsewhere.
const ALPHABETS = {
  "double-struck": [0x1d538, "ℂℍℕℙℚℝℤ"],
  fraktur: [0x1d504, "ℭℌℑℜℨ"],
  script: [0x1d49c, "ℬℰℱℋℐℒℳℛℯℊℴ"],
};

function changeLetters(node) {
  const [start, elsewhere] = ALPHABETS[node.getAttribute("mathvariant")] ?? [];
  if (!start) return;
  node.textContent = node.textContent.replace(/[A-Za-z]/g, (letter) => {
    const offset = letter >= "a" ? letter.charCodeAt(0) - 71 : letter.charCodeAt(0) - 65;
    const special = [...elsewhere].find((sign) => sign.normalize("NFKC") === letter);
    return special ?? String.fromCodePoint(start + offset);
  });
  node.removeAttribute("mathvariant");
}
