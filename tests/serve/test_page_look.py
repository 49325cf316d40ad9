"""What the page shows of the server, its languages and themes, on a phone and without a mouse.

See `test_page.py` for how.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from chromium import Chromium, Page
from page_server import (
    FakeServer,
    Reply,
    answer,
    chunk,
    device,
    ending,
    refusal,
    status,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]


def shares(page: Page, number: int) -> dict[str, float]:
    """How much of a device's bar each of its parts takes up, and where its forecast lies."""
    page.evaluate("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => 0)))")
    found: dict[str, float] = page.evaluate(
        f"(() => {{ const bar = document.querySelectorAll('.bar[role=img]')[{number}];"
        "const whole = bar.getBoundingClientRect(); const all = {};"
        "for (const part of bar.children) { const r = part.getBoundingClientRect();"
        "const mark = part.className === 'mark';"
        "all[part.classList[mark ? 0 : 1]] ="
        "(mark ? r.x + r.width / 2 - whole.x : r.width) / whole.width } return all })()"
    )
    return found


def test_memory_against_the_plan(browser: Chromium, server: FakeServer) -> None:
    assert server.status is not None
    server.status["engines"][0]["devices"] = [
        device("cuda:0", 12, 10.8, 10.2),
        device("cuda:1", 12, 10.8, 11.4),
        device("cuda:2", 12, 10.8, 15),
        device("cuda:3", 12, 10.8, 7.5),  # being loaded: the KV cache is not all there
    ]
    with browser.page(server.url) as page:
        page.wait_text("#monitor", "cuda:3")
        first = {"weights": 6 / 12, "kvCache": 3 / 12, "rest": 1.2 / 12, "mark": 10.8 / 12}
        assert shares(page, 0) == pytest.approx(first, abs=0.005)
        beyond = {"weights": 6 / 15, "kvCache": 3 / 15, "rest": 6 / 15, "mark": 10.8 / 15}
        assert shares(page, 2) == pytest.approx(beyond, abs=0.005)
        loading = {"weights": 6 / 12, "kvCache": 1.5 / 12, "rest": 0, "mark": 10.8 / 12}
        assert shares(page, 3) == pytest.approx(loading, abs=0.005)
        numbers = "[...document.querySelectorAll('.numbers .amount')].map((n) => n.innerText)"
        assert page.evaluate(numbers) == [
            "forecast 10.8 GiB",
            "0.6 GiB above the forecast",
            "3 GiB above the budget",
            "forecast 10.8 GiB",
        ]
        label = "document.querySelector('.bar[role=img]').getAttribute('aria-label')"
        spoken = "cuda:0: 10.2 GiB reserved of 12 GiB; forecast 10.8 GiB"
        assert page.evaluate(label) == spoken
        page.wait_text(".device", "346 of 1,536 in use")
        server.status = status() | {"running": 17, "waiting": 5, "tokens_per_second": 9.26}
        page.wait_text(".figures", "17")
        assert page.evaluate("document.querySelector('.figures').innerText.match(/[\\d.]+/g)") == [
            "17",
            "5",
            "9.3",
        ]
        assert page.count(".bar[role=img]") == 2
        assert page.complaints() == []


def test_replicas_have_states_of_their_own(browser: Chromium, server: FakeServer) -> None:
    assert server.status is not None
    engine = server.status["engines"][0]
    other = {**engine, "replica": 1, "state": "restarting", "reason": "killed by signal 9"}
    server.status["engines"] = [engine, other]
    with browser.page(server.url) as page:
        page.wait_text("#state", "1 of 2 ready")
        page.wait_text("[data-state=restarting] .replica", "Restarting")
        page.wait_text("[data-state=restarting]", "killed by signal 9")
        assert page.evaluate("document.getElementById('banner').hidden")  # it answers all the same
        page.click("#prompt")
        page.type("Hi")
        assert not page.evaluate("document.getElementById('send').disabled")


def test_models_to_choose_from(browser: Chromium, server: FakeServer) -> None:
    server.models = ["base", "tuned"]
    server.replies.append(answer("Yes."))
    with browser.page(server.url) as page:
        page.wait("!document.getElementById('models').hidden")
        page.evaluate("document.getElementById('models').value = 'tuned'")
        page.ask("Hi")
        page.wait_text(".answer", "Yes.")
        assert server.chats[0]["model"] == "tuned"


def test_languages(browser: Chromium, server: FakeServer) -> None:
    server.replies.append(refusal(429, "64 requests are waiting", Retry_After="60"))
    with browser.page(server.url, language="zh-CN") as page:
        page.wait_text("#state", "就绪")
        page.wait_text(".welcome", "想聊点什么？")
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert page.evaluate("document.getElementById('prompt').placeholder") == "消息"
        page.ask("你好")
        page.wait_text(".trouble", "等待队列已满。")
        page.click("#language")
        page.wait_text(".trouble", "The queue is full.")
        page.wait_text(".trouble button", "Try again in")
        page.wait_text("#monitor", "forecast 10.5 GiB")
        assert page.evaluate("document.getElementById('send').title") == "Send"
        assert page.evaluate("document.documentElement.lang") == "en"
        page.call("Page.reload")
        page.wait_text("#state", "Ready")


def ground(page: Page) -> str:
    color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return color


def test_themes(browser: Chromium, server: FakeServer) -> None:
    light, dark = "rgb(247, 246, 242)", "rgb(23, 25, 28)"
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        assert ground(page) == light
        page.click("#theme")
        assert ground(page) == dark
    with browser.page(server.url, dark=True) as page:
        page.wait_text("#state", "Ready")
        assert ground(page) == dark
        page.click("#theme")
        assert ground(page) == light
        page.call("Page.reload")
        page.wait("document.readyState === 'complete'")
        assert ground(page) == light


CONTRAST = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((numbers(color)[3] ?? 1) === 1) return color;
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const poor = [];
  let number = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest('.hidden, :disabled')) continue;
    number += 1;
    const [one, other] = [getComputedStyle(node).color, ground(node)].map(light);
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < 4.5) poor.push([walker.currentNode.data, contrast]);
  }
  return { poor, number };
})()
"""


COLORS = """
```python
@once
def f(x: int = 2) -> None:  # a comment
    r'A text.' + f'{x}'
```

```html
<p class="a">&amp;</p>
```

```diff
- old
+ new
```
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast(browser: Chromium, server: FakeServer, dark: bool) -> None:
    """4.5 to 1, which the Web Content Accessibility Guidelines ask for (AA)."""
    assert server.status is not None
    server.status["engines"][0]["devices"] += [
        device("cuda:2", 12, 10.8, 11.4),
        device("cuda:3", 12, 10.8, 15),
    ]
    server.replies += [
        answer(f"A [link](https://example.org), `code`, $x^2$.\n\n> more\n\n{COLORS}"),
        refusal(400, "no"),
    ]
    with browser.page(server.url, dark=dark) as page:
        page.wait_text("#state", "Ready")
        for text in ("Hi", "Again"):
            page.ask(text)
            page.wait_text(".turn.last .answer", "link" if text == "Hi" else "refused")
            page.wait("!document.getElementById('send').hidden")
        page.evaluate("Promise.all(document.getAnimations().map((a) => a.finished))")
        seen = page.evaluate(CONTRAST)
        assert seen["poor"] == []
        assert seen["number"] > 60
        colors = "new Set([...document.querySelectorAll('.code [class^=hljs-]')]"
        assert page.evaluate(f"{colors}.map((n) => getComputedStyle(n).color)).size") >= 6


def unnamed(page: Page) -> list[dict[str, Any]]:
    """What can be used, but has no name for a screen reader."""
    roles = ("button", "textbox", "combobox", "spinbutton", "link", "dialog", "log", "image")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    used = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(used) > 5
    return [node for node in used if not node.get("name", {}).get("value")]


def test_everything_has_a_name(browser: Chromium, server: FakeServer) -> None:
    server.replies.append(answer("```\ncode\n```"))
    server.models = ["base", "tuned"]
    with browser.page(server.url) as page:
        page.wait("!document.getElementById('models').hidden")
        page.ask("Hi")
        page.wait_text(".meta", "42 tokens")
        assert unnamed(page) == []
        # A placeholder is a name to the browser, but gone when something is written.
        fields = "[...document.querySelectorAll('input:not([hidden]), textarea, select')]"
        assert page.evaluate(f"{fields}.filter((n) => !n.labels.length).length") == 0
        page.click("#settings-button")
        assert unnamed(page) == []
        page.press("Escape")
        page.wait("!document.getElementById('settings').open")
        assert page.evaluate("document.activeElement.id") == "settings-button"


def test_without_a_mouse(browser: Chromium, server: FakeServer) -> None:
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.evaluate("document.activeElement.blur()")
        visited = []
        for _ in range(14):  # once around, past the browser's own controls
            page.press("Tab")
            visited.append(page.evaluate("document.activeElement.id"))
            outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
            # The box around the prompt changes its color; the link to it comes into sight.
            plain = "document.activeElement.matches('#prompt, .skip, body')"
            assert page.evaluate(f"{outlined} || {plain}"), visited
        page.evaluate("document.querySelector('.skip').focus()")
        page.press("Enter")
        assert page.evaluate("document.activeElement.id") == "prompt"
        tools = ["panel-button", "new-chat", "language", "theme", "settings-button"]
        assert [name for name in dict.fromkeys(visited) if name in tools] == tools
        assert {"messages", "prompt", "attach"} <= set(visited)


WIDE = (
    "[...document.querySelectorAll('body *')].filter((n) => n.checkVisibility() &&"
    "!n.closest('.hidden, .skip, .scroller, pre, svg') &&"
    "n.getBoundingClientRect().right > innerWidth + 1).map((n) => n.outerHTML.slice(0, 80))"
)


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_on_a_phone(browser: Chromium, server: FakeServer, language: str) -> None:
    word = "x" * 300
    server.models = ["a-model-with-a-name-that-is-much-too-long-for-a-phone", "another"]
    server.replies.append(answer(f"{word}\n\n```\n{word}\n```\n\n|{'a|' * 40}\n|{'-|' * 40}\n"))
    with browser.page(server.url, width=390, height=844, language=language) as page:
        page.wait("!document.getElementById('models').hidden")
        page.click("#prompt")
        page.type(word)
        page.click("#send")
        page.wait_text(".meta", "42")
        assert page.evaluate(WIDE) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.getElementById('messages').scrollWidth") == 390
        assert page.evaluate("document.documentElement.scrollHeight") <= 844
        assert page.evaluate("document.getElementById('panel').hidden")
        page.click("#panel-button")
        page.wait("document.getElementById('panel').checkVisibility()")
        assert page.evaluate("document.activeElement.id") == "panel-close"
        assert page.evaluate(WIDE) == []
        page.press("Escape")
        assert page.evaluate("document.getElementById('panel').hidden")
        assert page.evaluate("document.activeElement.id") == "panel-button"
        page.click("#settings-button")
        assert page.evaluate(WIDE) == []


def test_reading_further_up_is_not_disturbed(browser: Chromium, server: FakeServer) -> None:
    long = "\n\n".join(f"Line {number}" for number in range(200))
    gate = threading.Event()
    server.replies.append(Reply([chunk(content=long), gate, chunk(content=long), *ending()]))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Ready")
        page.ask("Hi")
        page.wait_text(".answer", "Line 199")
        root = "document.getElementById('messages')"
        end = f"{root}.scrollHeight - {root}.clientHeight - {root}.scrollTop"
        page.wait(f"{end} < 2")
        page.evaluate(f"{root}.scrollTop = 100")
        page.wait("!document.getElementById('newest').hidden")
        gate.set()
        page.wait_text(".meta", "42 tokens")
        assert page.evaluate(f"{root}.scrollTop") == 100
        page.click("#newest")
        page.wait(f"{end} < 2 && document.getElementById('newest').hidden")
        # The box grows over what was at the end, before the browser has told of the scrolling.
        page.evaluate(
            f"{root}.scrollTop = 100, document.getElementById('newest').click(), ((box) => {{"
            "box.value = 'A\\nlong\\nquestion\\nindeed'; box.dispatchEvent(new Event('input'))"
            "})(document.getElementById('prompt'))"
        )
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        page.wait(f"{end} < 2 && document.getElementById('newest').hidden")
