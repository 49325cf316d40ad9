"""The page of `duoka serve` in a real headless Chromium, against a server that a test directs.

The browser is what `DUOKA_CHROMIUM` says, or one on PATH (Debian: `apt-get install
chromium-headless-shell`); without one these tests are skipped. What can be said of the files alone
is in `test_page_files.py`, what hostile output may do in `test_page_hostile.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, Page
from page_server import (
    FakeServer,
    Forever,
    Reply,
    answer,
    chunk,
    device,
    ending,
    refusal,
    status,
)
from PIL import Image

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]

ANSWER = """\
## Two ways

3. the **first**, in `code`
4. the [second](https://example.org/page)

```python
print("hello")
```

| a | b |
|---|--:|
| 1 | 2 |
"""


@pytest.fixture
def page(browser: Chromium, server: FakeServer) -> Iterator[Page]:
    with browser.page(server.url) as opened:
        opened.wait_text("#state", "Ready")
        yield opened
        # That the server refuses is what some tests are about; all else is a fault of the page.
        refused = re.compile(r"Failed to load resource.*/(v1|duoka)/")
        assert [line for line in opened.complaints() if not refused.match(line)] == []


def picture_file(path: Path, size: tuple[int, int] = (40, 30)) -> Path:
    Image.new("RGB", size, (200, 90, 40)).save(path)
    return path


def test_an_answer_streams_in_as_markdown(page: Page, server: FakeServer) -> None:
    gate = threading.Event()
    first = [chunk(role="assistant", content=""), chunk(content=ANSWER[:30])]
    server.replies.append(Reply([*first, gate, chunk(content=ANSWER[30:]), *ending()]))
    page.ask("How?")
    page.wait_text(".answer ol", "the first")
    assert page.evaluate("!document.getElementById('stop').hidden")
    assert page.count(".answer table") == 0
    gate.set()
    page.wait_text(".answer .meta", "42 tokens")
    assert page.text(".answer h2") == "Two ways"
    assert page.text(".answer li strong") == "first"
    assert page.text(".code-top span") == "python"
    assert page.text(".code pre") == 'print("hello")\n'
    assert page.text(".answer td[align=right]") == "2"
    assert page.evaluate("document.querySelector('.answer ol').start") == 3
    link = "document.querySelector('.answer a')"
    assert page.evaluate(f"[{link}.href, {link}.target, {link}.rel]") == [
        "https://example.org/page",
        "_blank",
        "noopener noreferrer",
    ]
    assert server.chats == [
        {
            "model": "glm-4v-9b",
            "messages": [{"role": "user", "content": "How?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert all(address.startswith(server.url) for address in page.addresses())
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_a_stream_cut_anywhere_is_one_answer(page: Page) -> None:
    """Byte by byte: a network joins and parts what is sent as it likes."""
    event = ': a comment\r\ndata: {"choices": [{"delta": {"content": "多卡!"}}]}\r\n\r\n'
    text = event + "".join(
        f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n" for part in ending()
    )
    page.evaluate(
        f"const bytes = new TextEncoder().encode({json.dumps(text)});"
        "window.fetch = async () => new Response(new ReadableStream({start(stream) {"
        "for (const byte of bytes) stream.enqueue(Uint8Array.of(byte)); stream.close() }}))"
    )
    page.ask("Name?")
    page.wait_text(".answer .meta", "42 tokens")
    assert page.text(".answer > .markdown") == "多卡!"


def test_reasoning_is_shown_apart_and_not_sent_again(page: Page, server: FakeServer) -> None:
    gate = threading.Event()
    reasons = [chunk(reasoning_content="Let me "), chunk(reasoning_content="*think*.")]
    server.replies.append(Reply([*reasons, gate, chunk(content="Four."), *ending()]))
    server.replies.append(answer("Yes."))
    page.ask("2 + 2?")
    page.wait_text(".reasoning summary", "Thinking")
    page.wait_text(".reasoning .markdown", "Let me think.")
    gate.set()
    page.wait_text(".reasoning summary", "Reasoning")
    assert not page.evaluate("document.querySelector('.reasoning').open")
    assert page.text(".answer > .markdown") == "Four."
    page.ask("Sure?")
    page.wait_text(".turn.last .answer", "Yes.")
    assert server.chats[1]["messages"] == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.parametrize("key", ["", "Escape"])
def test_stop_keeps_what_came_and_ends_the_request(
    page: Page, server: FakeServer, key: str
) -> None:
    forever = Forever(chunk(content="more "))
    server.replies += [Reply([forever]), answer("Whole.")]
    page.ask("Talk")
    page.wait_text(".answer", "more more")
    if key:
        page.press(key)
    else:
        page.click("#stop")
    page.wait_text(".meta", "stopped")
    assert forever.left.wait(60)
    assert "more more" in page.text(".answer")
    page.click(".turn.last .turn-foot button[aria-label='Regenerate the answer']")
    page.wait_text(".answer > .markdown", "Whole.")
    assert "more" not in page.text(".answer > .markdown")
    assert server.chats[0] == server.chats[1]


def test_copying(page: Page, server: FakeServer) -> None:
    server.replies.append(answer(ANSWER))
    page.ask("How?")
    page.wait_text(".answer .meta", "42 tokens")
    # As the browser would have it from the reader's clipboard.
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.click(".code-top button")
    page.wait("window.copied === 'print(\"hello\")'")
    page.wait("document.querySelector('.code-top button').title === 'Copied'")
    page.click(".turn-foot button[aria-label='Copy']")
    page.wait("window.copied.length > 50")
    assert page.evaluate("window.copied") == ANSWER


def test_copying_without_https(page: Page, server: FakeServer) -> None:
    server.replies.append(answer("It is."))
    page.ask("So?")
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value })"
    )
    page.click(".turn-foot button[aria-label='Copy']")
    assert page.wait("window.copied") == "It is."


def test_settings_are_sent_and_stay(page: Page, server: FakeServer) -> None:
    server.replies += [answer("a"), answer("b")]
    page.click("#settings-button")
    for selector, value in (
        ("#system", "Be brief."),
        ("#temperature", "0.2"),
        ("#max-tokens", "7"),
    ):
        page.click(selector)
        page.type(value)
    page.click("#settings .main")
    for text in ("One", "Two"):
        page.ask(text)
        page.wait_text(".turn.last .question", text)
        page.wait_text(".turn.last .meta", "42 tokens")
        assert server.chats[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (server.chats[-1]["temperature"], server.chats[-1]["max_tokens"]) == (0.2, 7)
        page.call("Page.reload")
        page.wait("document.readyState === 'complete' && document.querySelectorAll('.meta').length")
    page.click("#settings-button")
    page.click("#max-tokens")
    page.evaluate("document.querySelector('#max-tokens').select()")
    page.type("0")
    page.click("#settings .main")
    assert page.evaluate("document.getElementById('settings').open")  # the browser says why
    page.press("Escape")  # as if nothing was written, then
    server.replies.append(answer("c"))
    page.ask("Three")
    page.wait_text(".turn.last .answer", "c")
    assert "max_tokens" not in server.chats[-1]


def test_pictures_by_button_paste_and_drop(page: Page, server: FakeServer, tmp_path: Path) -> None:
    server.replies.append(answer("Three squares."))
    page.wait("!document.getElementById('attach').hidden")
    page.choose_files("#files", [picture_file(tmp_path / "a.png")])
    page.wait("document.querySelectorAll('#attached img').length === 1")
    page.drop_files(
        ".messages", [picture_file(tmp_path / "b.jpg"), picture_file(tmp_path / "x.png")]
    )
    page.wait("document.querySelectorAll('#attached img').length === 3")
    page.click("#attached li:nth-child(2) button")
    page.evaluate(
        "(() => { const data = new DataTransfer();"
        "const bytes = Uint8Array.from(atob("
        "document.querySelector('#attached img').src.split(',')[1]), (c) => c.charCodeAt(0));"
        "data.items.add(new File([bytes], 'c.png', {type: 'image/png'}));"
        "document.querySelector('#prompt').dispatchEvent(new ClipboardEvent('paste',"
        "{clipboardData: data, bubbles: true, cancelable: true})) })()"
    )
    page.wait("document.querySelectorAll('#attached img').length === 3")
    page.ask("What is it?")
    page.wait_text(".answer", "Three squares.")
    (content,) = (message["content"] for message in server.chats[0]["messages"])
    assert [part["type"] for part in content] == ["image_url"] * 3 + ["text"]
    assert all(
        part["image_url"]["url"].startswith("data:image/png;base64,") for part in content[:3]
    )
    assert page.count(".question img") == 3
    assert page.evaluate("document.getElementById('attached').hidden")


def test_pictures_that_are_too_many_or_none(page: Page, server: FakeServer, tmp_path: Path) -> None:
    page.wait("!document.getElementById('attach').hidden")
    page.choose_files("#files", [picture_file(tmp_path / f"{i}.png") for i in range(5)])
    page.wait_text("#notice", "At most 4 images")
    assert page.count("#attached img") == 4
    page.click("#attached button")
    page.wait("document.querySelectorAll('#attached img').length === 3")
    text = tmp_path / "text.png"
    text.write_text("not a supported image")
    page.choose_files("#files", [text])
    page.wait_text("#notice", "text.png is no image")
    assert page.count("#attached img") == 3
    assert server.status is not None
    server.status["images"] = 0
    page.wait("document.getElementById('attach').hidden")
    page.drop_files(".messages", [picture_file(tmp_path / "b.png")])
    page.wait_text("#notice", "takes no images")


def test_a_large_picture_is_made_smaller(page: Page, server: FakeServer, tmp_path: Path) -> None:
    server.replies.append(answer("Large."))
    page.choose_files("#files", [picture_file(tmp_path / "a.png", (4096, 1024))])
    page.wait("document.querySelectorAll('#attached img').length === 1")
    image = "document.querySelector('#attached img')"
    assert page.evaluate(f"[{image}.naturalWidth, {image}.naturalHeight]") == [2048, 512]
    page.click("#send")
    page.wait_text(".answer", "Large.")
    assert [part["type"] for part in server.chats[0]["messages"][0]["content"]] == ["image_url"]


def test_a_key_is_asked_for_until_it_is_right(browser: Chromium, server: FakeServer) -> None:
    server.key = "s3cret"
    server.replies.append(answer("Hello."))
    with browser.page(server.url) as page:
        page.wait("document.getElementById('key').open")
        page.wait_text("#state", "Key needed")
        assert not page.evaluate("document.getElementById('key-wrong').checkVisibility()")
        page.type("wrong")
        page.press("Enter")
        page.wait_text("#key-wrong", "did not accept")
        page.wait("document.activeElement.id === 'key-input'")
        page.type("s3cret")
        page.press("Enter")
        page.wait_text("#state", "Ready")
        page.ask("Hi")
        page.wait_text(".answer", "Hello.")
        assert page.evaluate("sessionStorage.getItem('duoka.key')") == '"s3cret"'
        assert "s3cret" not in page.evaluate(
            "JSON.stringify(localStorage) + document.body.outerHTML"
        )
        assert not [address for address in page.addresses() if "s3cret" in address]


def test_a_key_withdrawn_in_the_middle(page: Page, server: FakeServer) -> None:
    """The question is asked again with the new key, once it is there."""
    server.replies.append(answer("Hello."))
    server.status = None
    page.wait_text("#state", "No answer")
    server.key = "new"
    page.ask("Hi")
    page.wait("document.getElementById('key').open")
    page.type("new")
    page.press("Enter")
    page.wait_text(".answer", "Hello.")


def test_a_full_queue_says_when_to_try_again(page: Page, server: FakeServer) -> None:
    message = "64 requests are waiting, the limit is 64"
    server.replies += [
        refusal(429, message, "queue_full", Retry_After="3"),
        refusal(429, "and again", "queue_full", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        answer("At last."),
    ]
    page.ask("Hi")
    page.wait_text(".trouble", "The queue is full.")
    page.wait_text(".trouble", message)
    assert re.fullmatch(r"Try again in [123] s", page.text(".trouble button"))
    assert page.evaluate("document.querySelector('.trouble button').disabled")
    page.wait_text(".trouble button", "Try again in 1 s")
    page.click(".trouble button:enabled")
    page.wait_text(".trouble", "and again")
    assert page.text(".trouble button") == "Try again"  # that date is long past
    page.click(".trouble button")
    page.wait_text(".answer", "At last.")
    assert page.count(".trouble") == 0
    assert len(server.chats) == 3


def test_the_engine_dies_in_the_middle(page: Page, server: FakeServer) -> None:
    died = {"error": {"message": "the engine has ended", "type": "server_error", "code": None}}
    server.replies += [Reply([chunk(content="Once upon"), died]), answer("The end.")]
    page.ask("Tell")
    page.wait_text(".trouble", "The answer broke off.")
    page.wait_text(".trouble", "the engine has ended")
    assert page.text(".answer > .markdown") == "Once upon"
    server.status = status("restarting", "killed by signal 9; next try in 4 s")
    page.wait_text("#banner", "is being restarted")
    page.wait_text("#banner", "killed by signal 9")
    page.wait_text("#state", "Restarting")
    page.ask("And?")
    assert page.evaluate("document.getElementById('send').disabled")
    assert len(server.chats) == 1
    server.status = status()
    page.wait("document.getElementById('banner').hidden")
    page.click(".trouble button")
    page.wait_text(".answer > .markdown", "The end.")
    assert page.evaluate("document.getElementById('prompt').value") == "And?"


@pytest.mark.parametrize(
    ("reply", "title", "detail"),
    [
        (Reply([chunk(content="Half")]), "broke off", "connection ended"),
        (Reply([chunk(content="Half"), "{no json"]), "broke off", "connection ended"),
        (refusal(503, "starting: 40 % loaded"), "engine is not ready", "40 % loaded"),
        (
            refusal(400, "9000 tokens, the limit is 8192", "context_length_exceeded"),
            "too long",
            "9000 tokens",
        ),
        (refusal(404, "no model of that name"), "refused", "no model of that name"),
    ],
)
def test_other_troubles(
    page: Page, server: FakeServer, reply: Reply, title: str, detail: str
) -> None:
    server.replies += [reply, answer("Fine.")]
    page.ask("Hi")
    page.wait_text(".trouble strong", title)
    page.wait_text(".trouble p", detail)
    page.ask("Again")
    page.wait_text(".turn.last .answer", "Fine.")
    # What was not answered is not sent again; half an answer is.
    texts = [message["content"] for message in server.chats[-1]["messages"]]
    assert texts == (["Hi", "Half", "Again"] if reply.events else ["Again"])
    assert not page.evaluate("document.querySelector('.trouble button').checkVisibility()")


def test_a_starting_server_becomes_ready(browser: Chromium, server: FakeServer) -> None:
    server.status = status("starting")
    server.status["engines"][0]["devices"] = [device("cuda:0", 12, 10.5, None)]
    server.status["pages"] = None
    server.replies.append(answer("Hello."))
    with browser.page(server.url) as page:
        page.wait_text("#state", "Starting")
        page.wait_text("#banner", "being loaded")
        page.wait_text(".device .numbers", "10.5 GiB planned of 12 GiB")
        assert not page.evaluate("document.querySelector('.device').checkVisibility()")  # pages
        page.ask("Hi")
        assert page.evaluate("document.getElementById('send').disabled")
        server.status = status()
        page.wait_text("#state", "Ready")
        page.click("#send")
        page.wait_text(".answer", "Hello.")


def test_a_server_that_does_not_answer_is_asked_again(page: Page, server: FakeServer) -> None:
    server.status = None
    page.wait_text("#state", "No answer")
    page.wait_text("#banner", "Trying again")
    server.status = status()
    page.wait_text("#state", "Ready")
    assert page.evaluate("document.getElementById('banner').hidden")


def test_enter_shift_enter_and_a_composed_enter(page: Page, server: FakeServer) -> None:
    server.replies.append(answer("Yes."))
    page.click("#prompt")
    page.type("多")
    page.evaluate(
        "document.getElementById('prompt').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    page.press("Enter", shift=True)
    page.type("卡")
    assert page.evaluate("document.getElementById('prompt').value") == "多\n卡"
    page.press("Enter")
    page.wait_text(".answer", "Yes.")
    assert [chat["messages"][0]["content"] for chat in server.chats] == ["多\n卡"]


def test_a_conversation_lasts_as_long_as_its_tab(page: Page, server: FakeServer) -> None:
    server.replies += [answer("First."), answer("Second.")]
    page.ask("One")
    page.wait_text(".meta", "42 tokens")
    page.call("Page.reload")
    page.wait_text(".answer", "First.")
    page.wait_text("#state", "Ready")
    page.ask("Two")
    page.wait_text(".turn.last .answer", "Second.")
    assert len(server.chats[1]["messages"]) == 3
    assert page.evaluate("Object.keys(localStorage).length") == 0
    gate = threading.Event()
    server.replies += [Reply([chunk(content="Never seen"), gate]), answer("Third.")]
    page.ask("Three")
    page.wait_text(".turn.last .answer", "Never seen")
    page.call("Page.reload")
    page.wait_text(".turn.last .trouble", "The answer broke off.")
    page.wait_text("#state", "Ready")
    gate.set()
    page.click(".turn.last .trouble button")
    page.wait_text(".turn.last .answer", "Third.")
    page.click("#new-chat")
    assert page.count(".turn") == 0
    page.call("Page.reload")
    page.wait_text(".welcome", "What shall we talk about?")


def test_forgetting_everything(page: Page, server: FakeServer) -> None:
    server.replies.append(answer("First."))
    page.ask("One")
    page.wait_text(".meta", "42 tokens")
    page.click("#settings-button")
    page.click("#system")
    page.type("Be brief.")
    page.click("#forget")
    page.wait_text(".welcome", "What shall we talk about?")
    kept = "JSON.stringify([localStorage, sessionStorage])"
    assert page.evaluate(kept) == "[{},{}]"
