"""Nothing that a model or a server writes runs as script on the page; see `test_page.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from chromium import Chromium, Page
from page_server import POLICY, FakeServer, Reply, chunk, ending, refusal, running_server

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]

RUN = "window.pwned=1"
HOSTILE = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}><script>{RUN}</script></svg>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    "<math><mtext><table><mglyph><style><!--</style>"
    f"<img title='--&gt;&lt;img src=1 onerror={RUN}&gt;'>",
    f"<details open ontoggle={RUN}>x</details>",
    f"[press](javascript:{RUN})",
    f"[press](  JaVaScRiPt:{RUN})",
    f"[press](java&#115;cript&colon;{RUN})",
    f"[press](data:text/html,<script>{RUN}</script>)",
    f"[press](vbscript:{RUN})",
    f"[press](/v1/models 'a\" onmouseover=\"{RUN}')",
    f'![x](x"onerror="{RUN})',
    f'![x](data:image/png;base64,AAAA"onerror="{RUN})',
    f'![" onerror="{RUN}](data:image/png;base64,AAAA)',
    "![spy](https://spy.example/picture.png)",
    "![own](/duoka/status?spy)",
    f"<javascript:{RUN}>",
    f'```"><img/src=x/onerror={RUN}>\nx\n```',
    f'```x"onmouseover="{RUN}\nx\n```',
    f"`<img src=x onerror={RUN}>`",
    f"| <img src=x onerror={RUN}> |\n|---|\n| <script>{RUN}</script> |",
    f"[a]: javascript:{RUN}\n\n[a]",
    "<style>body{display:none}</style><link rel=stylesheet href=https://spy.example/a.css>",
    "<form action=https://spy.example><input name=password><button>log in</button></form>",
    "<meta http-equiv=refresh content='0;url=https://spy.example'><base href=https://spy.example>",
    f"<a href='#' onclick={RUN} class=trouble id=send style='position:fixed'>press</a>",
    f"<br onclick={RUN}>",
    "<br>",
    f"\u0000<scr\u0000ipt>{RUN}</scr\u0000ipt>",
]
TEXT = "\n\n".join(HOSTILE)
FORBIDDEN = "script, style, iframe, object, embed, form, input, button, svg, math, link, meta, base"


# The policy is a wall of its own; without it the page alone has to hold.
@pytest.fixture(params=[POLICY, ""], ids=["policy", "no policy"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with running_server() as running:
        running.policy = request.param
        yield running


def assert_harmless(page: Page, server: FakeServer, root: str) -> None:
    """No script has run, nothing could, nothing was fetched; links are pressed to see."""
    inside = (
        f"[...document.querySelectorAll('{root} *')]"
        ".filter((n) => !n.closest('.code-top button'))"  # the page's own
    )
    attributes = (
        f"{inside}.flatMap((n) => [...n.attributes].map((a) => `${{n.tagName}} ${{a.name}}`))"
        ".filter((a) => / (on|style|id|srcdoc|action)/.test(a))"
    )
    assert page.evaluate(attributes) == []
    assert page.evaluate(f"{inside}.filter((n) => n.matches('{FORBIDDEN}')).length") == 0
    links = page.evaluate(
        f"{inside}.filter((n) => n.tagName === 'A').map((n) => n.getAttribute('href'))"
    )
    assert [link for link in links if link is not None and not link.startswith("https://")] == []
    sources = page.evaluate(f"{inside}.filter((n) => n.tagName === 'IMG').map((n) => n.src)")
    assert [source for source in sources if not source.startswith("data:image/")] == []
    page.evaluate(
        f"{inside}.forEach((n) => {{ n.removeAttribute('target');"
        "if (n.tagName !== 'A' || !n.href) n.click();"
        "n.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})) })"
    )
    assert page.evaluate("window.pwned === undefined")
    fetched = [address for address in page.addresses() if not address.startswith("data:image/")]
    assert all(address.startswith(server.url) for address in fetched)
    assert not [address for address in fetched if "spy" in address]


def test_an_answer_runs_nothing(browser: Chromium, server: FakeServer) -> None:
    # In small pieces: what is harmless whole may not be so half.
    pieces = [TEXT[start : start + 7] for start in range(0, len(TEXT), 7)]
    events = [chunk(reasoning_content=piece) for piece in pieces]
    events += [chunk(content=piece) for piece in pieces]
    server.replies.append(Reply([*events, *ending()]))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Hi")
        page.wait_text(".answer .meta", "42 tokens")
        assert page.count(".answer > .markdown br") == 1
        assert_harmless(page, server, ".markdown")


def test_markup_is_shown_as_it_was_written(browser: Chromium, server: FakeServer) -> None:
    written = "<p>Is <b>1 < 2</b> & <script>x</script>?</p>"
    server.replies.append(Reply([chunk(content=written), *ending()]))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Hi")
        page.wait_text(".answer .meta", "42 tokens")
        assert page.text(".answer > .markdown") == written


@pytest.mark.parametrize("text", HOSTILE)
def test_each_alone(browser: Chromium, text: str) -> None:
    with running_server() as server:
        server.policy = ""
        with browser.page(server.url) as page:
            page.wait_text("#state", "Ready")
            page.evaluate(
                "import('/page/markdown.js').then(({MarkdownView}) => {"
                "const root = document.getElementById('welcome'); root.className = 'markdown';"
                f"new MarkdownView(root).finish({json.dumps(text)}) }})"
            )
            assert page.count(".markdown .block") > 0
            assert_harmless(page, server, ".markdown")


def test_what_the_server_says_is_text(browser: Chromium, server: FakeServer) -> None:
    markup = f"<img src=x onerror={RUN}>"
    server.models = [markup, f"{markup}2"]
    assert server.status is not None
    server.status |= {"model": markup, "version": markup}
    engine = server.status["engines"][0]
    server.status["engines"] = [engine, {**engine, "state": "failed", "reason": markup}]
    engine["devices"][0] |= {"name": markup, "gpu": markup}
    server.replies.append(refusal(400, markup, markup))
    with browser.page(server.url) as page:
        page.wait_text("#monitor", markup)
        page.ask("Hi")
        page.wait_text(".trouble", markup)
        assert page.count("img") == 0
        assert page.evaluate("window.pwned === undefined")


def test_a_nest_too_deep_is_shown_as_text(browser: Chromium, server: FakeServer) -> None:
    nest = ">" * 20000 + " deep"
    server.replies += [
        Reply([chunk(content=nest), *ending()]),
        Reply([chunk(content="Fine."), *ending()]),
    ]
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Hi")
        page.wait_text(".answer .meta", "42 tokens")
        assert page.evaluate("document.querySelector('.answer > .markdown').textContent") == nest
        page.ask("Hi")
        page.wait_text(".turn.last .answer", "Fine.")
