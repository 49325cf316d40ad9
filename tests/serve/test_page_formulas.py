r"""Formulas in the page's Markdown: `$…$`, `\(…\)`, `$$…$$` and `\[…\]`; see `test_page.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Chromium, Page
from page_server import POLICY, FakeServer, Reply, answer, chunk, ending

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]

# The text of a block, with formulas in brackets: ⟦in a line⟧, ⟦⟦on lines of their own⟧⟧.
READ = """
(root) => {
  const copy = root.cloneNode(true);
  for (const node of copy.querySelectorAll('.formula')) {
    const [math, ...more] = node.children;
    if (math.localName !== 'math' || more.length) return 'no formula';
    const text = math.textContent.replace(/[\\u2061\\u200b]/g, '');
    const display = node.matches('.display') && math.getAttribute('display') === 'block';
    node.replaceWith(display ? `⟦⟦${text}⟧⟧` : `⟦${text}⟧`);
  }
  return [...copy.children].map((block) => block.textContent.trim());
}
"""
FORMULAS = {
    "It is $x_1^2$.": "It is ⟦x12⟧.",
    r"It is \(a + b\), no?": "It is ⟦a+b⟧, no?",
    "其中$d$是维度，$n$ 是长度": "其中⟦d⟧是维度，⟦n⟧ 是长度",
    r"in \[ a \] a line": "in ⟦⟦a⟧⟧ a line",
    r"a $ b $ c $ \frac{d}{e} $": "a ⟦b⟧ c ⟦de⟧",
    "so $$ a $$ in a line": "so ⟦⟦a⟧⟧ in a line",
    "$$x$$ begins a line": "⟦⟦x⟧⟧ begins a line",
    r"\[ x \].": "⟦⟦x⟧⟧.",
    "the $i$th, $n$-th and $k$s": "the ⟦i⟧th, ⟦n⟧-th and ⟦k⟧s",
    r"3$\times$3": "3⟦×⟧3",
    r"$\{x\}$ and $\$5$": "⟦{x}⟧ and ⟦$5⟧",
    "$a * b$ and $c * d$, $e_1$ _f_ $g_2$": "⟦a∗b⟧ and ⟦c∗d⟧, ⟦e1⟧ f ⟦g2⟧",
    "**bold $a*b*c$ end** *$x$*": "bold ⟦a∗b∗c⟧ end ⟦x⟧",
    "# About $x$": "About ⟦x⟧",
    "> $x$": "⟦x⟧",
    "[to $x$](https://example.org)": "to ⟦x⟧",
    r"$\stackrel{d}{=}$ $\overset{!}{x}$": "⟦=d⟧ ⟦x!⟧",
    r"$\underset{x}{\operatorname{argmin}}$": "⟦argminx⟧",
    r"$\lVert v \rVert = |x|$": "⟦‖v‖=∣x∣⟧",
    r"$2 \text{ and } 3$": "⟦2 and 3⟧".replace(" ", "\u00a0"),
    "$5$ and $6$": "⟦5⟧ and ⟦6⟧",
    r"$\text{多卡} < y$": "⟦多卡<y⟧",
    "costs $5, where $x$ is": "costs $5, where ⟦x⟧ is",
    r"`$a$` and $b$ and `\(c\)`": r"$a$ and ⟦b⟧ and \(c\)",
    "$\\mathbb{R}\\mathfrak{g}\\mathcal{LA}\\mathbf{w}$": "⟦ℝ𝔤ℒ𝒜w⟧",
}
TEXTS = [
    "It costs $5 and $6.",
    "It costs $5, or 6$ there.",
    "$5-$10, US$5 and US$6",
    "价格是$5，或者6$。",
    "$HOME/bin:$PATH",
    "5 $ or 6 $ each",
    "$x, and no end",
    "$ x$ and $x $",
    "$a`b$c`",
]
CODE = [r"`$x$`", "```\n$$x$$\n\\[y\\]\n```", "```tex\n$x$\n```", "    $$x$$", "`` \\(`x`\\) ``"]


def open_view(page: Page) -> None:
    page.wait_text("#state", "Ready")
    page.evaluate(
        "import('/page/markdown.js').then(({ MarkdownView }) => {"
        "window.root = document.getElementById('welcome'); root.className = 'markdown';"
        f"root.replaceChildren(); window.view = new MarkdownView(root); window.read = {READ} }})"
    )


@pytest.fixture
def page(browser: Chromium, server: FakeServer) -> Iterator[Page]:
    with browser.page(server.url) as opened:
        open_view(opened)
        yield opened
        assert opened.complaints() == []


def finished(page: Page, text: str) -> list[str]:
    blocks: list[str] = page.evaluate(f"view.finish({json.dumps(text)}), read(root)")
    return blocks


def streamed(page: Page, text: str) -> list[str]:
    blocks: list[str] = page.evaluate(f"view.update({json.dumps(text)}), read(root)")
    return blocks


def test_formulas_as_models_write_them(page: Page) -> None:
    for text, expected in FORMULAS.items():
        assert finished(page, text) == [expected]
    assert page.evaluate("view.finish('**a $b*c*d$ e**'), root.innerHTML").count("<strong>") == 1


def test_formulas_on_lines_of_their_own(page: Page) -> None:
    for start, end in (("$$", "$$"), (r"\[", r"\]")):
        formula = f"{start}\na\n+ b\n\n- c\n{end}"
        assert finished(page, f"So:\n{formula}\nwhere") == ["So:", "⟦⟦a+b−c⟧⟧", "where"]
        assert finished(page, f"1. So:\n   {start}x{end}\n2. $y$") == ["So:\n⟦⟦x⟧⟧\n⟦y⟧"]
        assert finished(page, f"> {start}\n> x\n> {end}") == ["⟦⟦x⟧⟧"]
        assert finished(page, f"{start}\nx\n{end} where $y$") == ["⟦⟦x⟧⟧", "where ⟦y⟧"]
    aligned = r"\[\begin{aligned} a &= b \\ &= c \end{aligned}\]"
    assert finished(page, aligned) == ["⟦⟦a=b=c⟧⟧"]
    cells = "[...root.querySelectorAll('mtd')].map((cell) => getComputedStyle(cell).textAlign)"
    assert page.evaluate(cells) == ["right", "left", "right", "left"]
    assert finished(page, "| a |\n|---|\n| $x^2$ |")[0].endswith("⟦x2⟧")


def test_sums_of_money_and_code_stay_text(page: Page) -> None:
    for text in TEXTS:
        assert finished(page, text) == streamed(page, text) == [text.replace("`", "")]
    assert finished(page, r"\$5 and \$6") == ["$5 and $6"]
    for text in CODE:
        finished(page, text)
        assert page.evaluate("root.querySelectorAll('code').length === 1 && !window.math")
        assert page.count(".markdown math") == 0
    assert page.text(".markdown code") == r"\(`x`\)"


def test_what_is_no_tex_stays_as_it_was_written(page: Page) -> None:
    deep = "{" * 4000 + "}" * 4000
    for text in (r"$\frac{1$", r"$\nosuchcommand$", r"\(\nosuchcommand\)", f"$${deep}$$"):
        assert finished(page, text) == [text]
    page.evaluate("console.error = () => { throw new Error('nothing to complain about') }")
    assert finished(page, r"\[ \begin{x} \]") == [r"\[ \begin{x} \]"]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (r"\( a_1*b_2*c_3 \)", "⟦a1∗b2∗c3⟧"),
        ("$$\na\n+ b\n# c\n$$", "⟦⟦a+b#c⟧⟧"),
        ("\\[\na_1 * b\n- c\n=\n\\]", "⟦⟦a1∗b−c=⟧⟧"),
        (r"So \[ a_*b_* \]", "So ⟦⟦a∗b∗⟧⟧"),
    ],
)
def test_an_unfinished_formula_stays_text(page: Page, formula: str, expected: str) -> None:
    """However much of it has come, it is one block with the text as it was written."""
    formula = formula.replace("# c", r"\# c").replace("a_*b_*", "a*b*")
    begin = next(n for n in range(len(formula)) if formula[n:].startswith(("\\(", "\\[", "$$")))
    for length in range(begin + 2, len(formula)):
        (text,) = streamed(page, formula[:length])
        assert " ".join(text.split()) == " ".join(formula[:length].split())
    assert streamed(page, formula) == finished(page, formula) == [expected]


def test_a_formula_streams_in(browser: Chromium, server: FakeServer) -> None:
    text = "So $x^2$ and\n\n$$\n\\frac{a}{b}\n$$\n\nfollows."
    server.replies.append(Reply([*(chunk(content=sign) for sign in text), *ending()]))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Why?")
        page.wait_text(".answer .meta", "42 tokens")
        assert page.count(".answer .formula math") == 2
        assert page.count(".answer .formula.display mfrac") == 1
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
        page.click(".turn-foot button[aria-label='Copy']")
        assert page.wait("window.copied") == text
        assert page.complaints() == []


SHAPES = " ".join([
    r"$$\boxed{x}$$ $\cancel{y}$ $\overline{ab}$ $\xrightarrow{abc} = d$ $\stackrel{e}{=}$",
    r"$\left[\begin{array}{c|c} 1 & 2 \\ \hline 3 & 4 \end{array}\right]$",
    r"$\underset{x}{\operatorname{argmin}}$ $\begin{vmatrix} 5 \\ 6 \end{vmatrix}$",
])  # fmt: skip
BOX = "(n) => n.getBoundingClientRect()"


def assert_shapes(page: Page) -> None:
    """What Chromium leaves out of MathML is there: borders, strikes, high bars, stacked signs."""
    signs = "[...document.querySelectorAll(':is(mi, mo, mn, mtext):not(:empty)')]"
    unseen = f"{signs}.filter((n) => !/^[\\u2061\\u200b]*$/.test(n.textContent) && !n.clientWidth"
    assert page.evaluate(f"{unseen} && !({BOX})(n).width).map((n) => n.outerHTML)") == []
    # The bars of a determinant are as high as it; a label doesn't lie over what follows.
    bars = "[...document.querySelectorAll('mrow:has(> mtable) > mo')].slice(-2)"
    assert min(page.evaluate(f"{bars}.map(({BOX})).map(({{ height }}) => height)")) > 35
    label, after = "[data-padded]", "mover:has([data-padded]) + mo"
    boxes = f"['{label}', '{after}'].map((s) => document.querySelector(s)).map({BOX})"
    assert page.evaluate(f"(([label, after]) => label.right <= after.left)({boxes})")
    for selector, name, value in (
        ("menclose[notation=box]", "borderTopWidth", "1px"),
        ("menclose[notation=top]", "borderTopWidth", "1px"),
        ("menclose[notation=updiagonalstrike]", "background", "gradient"),
        ("mtd[data-beside]", "borderRightWidth", "1px"),
        ("[data-below] mtd", "borderBottomWidth", "1px"),
    ):
        style = f"getComputedStyle(document.querySelector('{selector}'))"
        assert value in page.evaluate(f"{style}.{name}")


@pytest.mark.parametrize("width", [1440, 390])
def test_formulas_are_drawn(browser: Chromium, server: FakeServer, width: int) -> None:
    wide = " + ".join(f"x_{{{number}}}" for number in range(100))
    text = f"$$\\frac{{a}}{{b}}$$\n\n$$ {wide} $$\n\nin ${wide}$\n\n{SHAPES}"
    server.replies.append(answer(text))
    with browser.page(server.url, width=width, height=844) as page:
        page.wait_text("#state", "Ready")
        page.ask("Draw")
        page.wait_text(".answer .meta", "42 tokens")
        # One term of a fraction is over the other; what is too wide scrolls by itself.
        boxes = f"[...document.querySelector('mfrac').children].map({BOX})"
        assert page.evaluate(f"(([over, under]) => over.bottom <= under.top)({boxes})")
        assert page.evaluate("document.getElementById('messages').scrollWidth") <= width
        scrollers = "[...document.querySelectorAll('.formula.display, .block')]"
        too_wide = f"{scrollers}.filter((n) => n.scrollWidth > n.clientWidth)"
        assert page.evaluate(f"{too_wide}.length") == 2
        assert_shapes(page)
        assert page.complaints() == []


HOSTILE = [
    r"\href{javascript:window.pwned=1}{x}",
    r"\url{javascript:window.pwned=1}",
    r"\includegraphics{https://spy.example/a.png}",
    r"\htmlStyle{position: fixed}{x}\htmlId{send}{x}\htmlClass{trouble}{x}\htmlData{text=send}{x}",
    r"\text{<img src=x onerror=window.pwned=1><script>window.pwned=1</script>}",
    r"\fcolorbox{red}{url(https://spy.example/a)}{x}",
    r"\color{red;background:url(https://spy.example/b)}x",
    r"\rule{9999em}{9999em}",
    r"\def\a{\a\a}\a",
    "x" * 20000,
]
# What a formula must not become, whatever KaTeX makes of it.
MARKUP = [
    "<mtext><img xmlns='HTML' src='x' onerror='window.pwned=1'/></mtext><mi>x</mi>",
    "<mtext><table xmlns='HTML'><mglyph><style>/*</style></mglyph></table></mtext><mi>x</mi>",
    "<mi href='javascript:window.pwned=1' style='position:fixed' onclick='window.pwned=1' "
    "class='trouble' id='send'>x</mi>",
    "<annotation-xml encoding='text/html'><script xmlns='HTML'>window.pwned=1</script>"
    "</annotation-xml><semantics><mi>x</mi><annotation>y</annotation></semantics>",
    "<maction actiontype='toggle'><mi>x</mi></maction><mglyph src='https://spy.example/a'/>",
    "<mi><a xmlns='HTML' href='javascript:window.pwned=1'>x</a></mi>",
    "<mi xlink:href='javascript:window.pwned=1' xmlns:xlink='http://www.w3.org/1999/xlink'>x</mi>",
    "<mi>x</mi><svg xmlns='http://www.w3.org/2000/svg' onload='window.pwned=1'><script>"
    "window.pwned=1</script></svg>",
]
NO_XML = "<math><mtext><img src=x onerror=window.pwned=1></mtext></math>"
HARMLESS: dict[str, Any] = {"foreign": [], "attributes": []}
MATHML = "http://www.w3.org/1998/Math/MathML"


def foreign(page: Page) -> dict[str, Any]:
    """What there is in formulas beside MathML, and attributes that could do something."""
    found: dict[str, Any] = page.evaluate(
        "(() => { const all = [...root.querySelectorAll('.formula *')]; return {"
        f"foreign: all.filter((n) => n.namespaceURI !== '{MATHML}').map((n) => n.outerHTML),"
        "attributes: all.flatMap((n) => [...n.attributes].map((a) => a.name))"
        ".filter((name) => /^(on|style|id|class|href|src|xlink)/.test(name)),"
        "pwned: window.pwned } })()"
    )
    return found


def test_hostile_formulas_are_harmless(page: Page) -> None:
    for tex in HOSTILE:
        page.evaluate(f"view.finish({json.dumps(f'$${tex}$$')})")
        assert foreign(page) == HARMLESS, tex
        sizes = "[...root.querySelectorAll('mspace')].map((n) => n.getAttribute('width'))"
        assert set(page.evaluate(sizes)) <= {"20em"}
        assert page.count("#welcome :is(img, a, script, svg)") == 0
    assert not [address for address in page.addresses() if "spy" in address]


def test_nothing_but_mathml_comes_of_a_formula(browser: Chromium, server: FakeServer) -> None:
    """Even if KaTeX made something else, and the browser knew no policy."""
    assert "script-src 'self'" in POLICY
    server.policy = ""
    with browser.page(server.url) as page:
        open_view(page)
        stub = "katex.renderToString = () => {}; view.finish('${}$')"
        for number, markup in enumerate(MARKUP):
            written = markup.replace("HTML", "http://www.w3.org/1999/xhtml")
            whole = json.dumps(f"<span><math xmlns='{MATHML}'>{written}</math></span>")
            page.evaluate(stub.format(whole, number))
            assert foreign(page) == HARMLESS, markup
            assert page.evaluate("root.querySelector('math').textContent") == "x", markup
            forbidden = "img, a, script, svg, style, annotation, maction, mglyph, table"
            assert page.count(f"#welcome :is({forbidden})") == 0
        page.evaluate(stub.format(json.dumps(NO_XML), "y"))
        assert page.evaluate("root.innerHTML.trim()") == '<div class="block"><p>$y$</p>\n</div>'
        assert not [address for address in page.addresses() if "spy" in address]
