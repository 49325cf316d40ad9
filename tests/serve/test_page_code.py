"""Colors of code on the page; see `test_page.py`."""

from __future__ import annotations

import json
import threading

import pytest
from chromium import Chromium, Page
from page_server import FakeServer, Reply, answer, chunk, ending

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]

CODE = 'def double(x):\n    return "<b>" + 2 * x  # &amp;\n'
COLORS = {
    "keyword": "def",
    "title": "double",
    "string": '"<b>"',
    "number": "2",
    "comment": "# &amp;",
}


def colored(page: Page, number: int) -> dict[str, str]:
    """The first text of each kind in a block of code."""
    texts: dict[str, str] = page.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('.code')[{number}]"
        ".querySelectorAll('[class^=hljs-]')].reverse()"
        ".map((n) => [n.classList[0].replace('hljs-', ''), n.textContent]))"
    )
    return texts


def test_code_has_colors_when_it_has_ended(browser: Chromium, server: FakeServer) -> None:
    gates = [threading.Event(), threading.Event()]
    parts = [f"```python\n{CODE}```\n\n", "```sh\nls # all\n```", "\n\nEnd"]
    events = [parts[0][:30], parts[0][30:] + parts[1][:8], gates[0], parts[1][8:], gates[1]]
    sent = [chunk(content=event) if isinstance(event, str) else event for event in events]
    server.replies.append(Reply([*sent, chunk(content=parts[2]), *ending()]))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Code?")
        # The first block has ended where the second begins; that one still grows.
        page.wait("document.querySelectorAll('.code').length === 2")
        assert colored(page, 0).items() >= COLORS.items()
        gates[0].set()
        page.wait_text(".code", "ls # all")
        assert colored(page, 1) == {}
        gates[1].set()
        page.wait_text(".answer .meta", "42 tokens")
        assert colored(page, 1)["comment"] == "# all"
        labels = "[...document.querySelectorAll('.code-top span')].map((n) => n.textContent)"
        assert page.evaluate(labels) == ["python", "sh"]
        assert page.evaluate("document.querySelector('.code pre').textContent") == CODE
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
        page.click(".code-top button")
        assert page.wait("window.copied") == CODE.rstrip("\n")
        assert page.complaints() == []


@pytest.mark.parametrize(
    "text",
    [
        "```nosuchlanguage\ndef double(x): return 2\n```",
        "```\ndef double(x): return 2\n```",
        "    def double(x): return 2",
        "```python\n" + "x = 1\n" * 10000 + "```",
        "`def double(x)`",
    ],
    ids=["unknown", "none", "indented", "long", "in a line"],
)
def test_other_code_stays_plain(browser: Chromium, server: FakeServer, text: str) -> None:
    server.replies.append(answer(text))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Code?")
        page.wait_text(".answer .meta", "42 tokens")
        assert page.count(".answer code") == 1
        assert page.count(".answer code *") == 0


def test_nothing_but_colors_comes_of_the_highlighter(browser: Chromium, server: FakeServer) -> None:
    """Even if it made something else; another text than the code's is not shown at all."""
    markup = {
        "<b onclick=run() class=trouble>1\n</b>": "1\n",
        "<span onclick=run() id=send class=trouble>1\n</span>": "<span>1\n</span>",
        "<span class=hljs-number>1</span><img src=x onerror=run()>\n": (
            '<span class="hljs-number">1</span>\n'
        ),
        "<span class=hljs-number>2</span>\n": "1\n",
    }
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.evaluate(
            "Promise.all([import('/page/markdown.js'), import('/page/highlight.min.js')])"
            ".then(([{ MarkdownView }, { default: hljs }]) => { window.drawn = (value) => {"
            "const root = document.createElement('div'); hljs.highlight = () => ({ value });"
            "new MarkdownView(root).finish('```python\\n1\\n```');"
            "return root.querySelector('code').innerHTML } })"
        )
        for value, expected in markup.items():
            assert page.evaluate(f"drawn({json.dumps(value)})") == expected
