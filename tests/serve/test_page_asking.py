"""Editing a question, regenerating an answer and switching thinking; see `test_page.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, Page
from page_server import FakeServer, Reply, answer, chunk, ending, refusal
from PIL import Image

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("browser")]

EDIT = ".question-foot button[aria-label='Edit the question']"
REGENERATE = ".turn-foot button[aria-label^='Regenerate']"
EDITOR = ".question textarea"


@pytest.fixture
def page(browser: Chromium, server: FakeServer) -> Iterator[Page]:
    assert server.status is not None
    server.status["switches_thinking"] = True
    with browser.page(server.url) as opened:
        opened.wait_text("#state", "Ready")
        yield opened


def converse(page: Page, server: FakeServer, *numbers: int) -> None:
    """Have turns of a conversation: Q1, A1, Q2, A2."""
    for number in numbers:
        server.replies.append(answer(f"A{number}"))
        page.ask(f"Q{number}")
        page.wait_text(".turn.last .question", f"Q{number}")
        page.wait_text(".turn.last .meta", "42 tokens")


def sent(server: FakeServer) -> list[str]:
    """The texts of the last request."""
    return [message["content"] for message in server.chats[-1]["messages"]]


def shown(page: Page) -> list[list[str]]:
    """The questions and answers of the page."""
    turns: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('.turn')].map((turn) =>"
        "[turn.querySelector('.question p'), turn.querySelector('.answer > .markdown')]"
        ".map((node) => node?.innerText))"
    )
    return turns


def reload(page: Page) -> None:
    page.call("Page.reload")
    page.wait("document.readyState === 'complete' && document.querySelectorAll('.meta').length")


def change_text(page: Page, text: str) -> None:
    page.wait("document.activeElement.matches('.question textarea')")
    page.evaluate("document.activeElement.select()")
    page.type(text)


@pytest.mark.parametrize("by", ["Enter", "button"])
def test_an_edited_question_is_asked_in_its_place(page: Page, server: FakeServer, by: str) -> None:
    converse(page, server, 1, 2, 3)
    server.replies += [answer("New"), answer("A4")]
    page.click(f".turn:nth-child(3) {EDIT}")
    page.wait_text(".question .quiet", "What follows this question will be removed.")
    assert page.evaluate("document.activeElement.value") == "Q2"
    change_text(page, "  Other  ")
    if by == "Enter":
        page.press("Enter", shift=True)
        page.type("line ")
        page.press("Enter")
    else:
        page.type("\nline")
        page.click(".question .buttons .main")
    page.wait_text(".turn.last .answer", "New")
    assert sent(server) == ["Q1", "A1", "Other  \nline"]
    assert shown(page) == [["Q1", "A1"], ["Other  \nline", "New"]]
    assert page.evaluate("document.activeElement.id") == "prompt"
    reload(page)
    assert [turn[1] for turn in shown(page)] == ["A1", "New"]
    page.ask("Q4")
    page.wait_text(".turn.last .answer", "A4")
    assert sent(server) == ["Q1", "A1", "Other  \nline", "New", "Q4"]
    assert page.complaints() == []


def test_an_edit_can_be_left(page: Page, server: FakeServer) -> None:
    converse(page, server, 1)
    for leave in ("Escape", "button"):
        page.click(EDIT)
        assert not page.evaluate("document.querySelector('.question .quiet').checkVisibility()")
        change_text(page, "Other")
        if leave == "Escape":
            page.press("Escape")
        else:
            page.click(".question .buttons .plain")
        assert shown(page) == [["Q1", "A1"]]
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == (
            "Edit the question"
        )
    page.click(EDIT)
    change_text(page, " ")
    assert page.evaluate("document.querySelector('.question .main').disabled")
    page.press("Enter")
    page.evaluate(
        "document.activeElement.value = '多', document.activeElement.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    assert page.count(EDITOR) == 1
    assert len(server.chats) == 1


def test_pictures_stay_with_an_edited_question(
    page: Page, server: FakeServer, tmp_path: Path
) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    server.replies += [answer("One"), answer("Two"), answer("Three")]
    page.wait("!document.getElementById('attach').hidden")
    page.choose_files("#files", [tmp_path / "a.png"])
    page.wait("document.querySelectorAll('#attached img').length === 1")
    page.ask("What?")
    page.wait_text(".answer .meta", "42 tokens")
    for text, reply in (("Where?", "Two"), ("", "Three")):
        page.click(EDIT)
        change_text(page, text)
        if not text:
            page.evaluate(
                "document.activeElement.value = '',"
                "document.activeElement.dispatchEvent(new Event('input'))"
            )
        assert page.count(".question img") == 1
        page.press("Enter")
        page.wait_text(".answer", reply)
        page.wait_text(".answer .meta", "42 tokens")
        (message,) = server.chats[-1]["messages"]
        kinds = [part["type"] for part in message["content"]]
        assert kinds == (["image_url", "text"] if text else ["image_url"])
        assert page.count(".question img") == 1


def test_regenerating_answers(page: Page, server: FakeServer) -> None:
    converse(page, server, 1, 2, 3)
    server.replies += [answer("New 3"), answer("New 1")]
    last, earlier = f".turn.last {REGENERATE}", f".turn:nth-child(2) {REGENERATE}"
    page.click(last)
    page.wait_text(".turn.last .answer", "New 3")
    page.wait_text(".turn.last .meta", "42 tokens")
    assert sent(server) == ["Q1", "A1", "Q2", "A2", "Q3"]
    assert shown(page) == [["Q1", "A1"], ["Q2", "A2"], ["Q3", "New 3"]]
    assert page.evaluate(f'document.querySelector("{last}").title') == "Regenerate the answer"
    title = "Regenerate this answer, and remove what follows"
    assert page.evaluate(f'document.querySelector("{earlier}").title') == title
    page.click(earlier)
    page.wait_text(".turn.last .answer", "New 1")
    page.wait_text(".turn.last .meta", "42 tokens")
    assert sent(server) == ["Q1"]
    assert shown(page) == [["Q1", "New 1"]]
    reload(page)
    assert shown(page) == [["Q1", "New 1"]]


def test_nothing_is_changed_while_an_answer_comes(page: Page, server: FakeServer) -> None:
    converse(page, server, 1)
    page.click(EDIT)
    change_text(page, "Other")
    gate = threading.Event()
    server.replies += [Reply([chunk(content="A2"), gate, *ending()]), answer("New")]
    page.ask("Q2")
    page.wait_text(".turn.last .answer", "A2")
    buttons = f'[...document.querySelectorAll("{EDIT}, {REGENERATE}, .question .main")]'
    assert page.evaluate(f"{buttons}.length") == 5
    assert page.evaluate(f"{buttons}.every((button) => button.disabled)")
    page.evaluate(f"document.querySelector('{EDITOR}').focus()")
    page.press("Enter")
    assert len(server.chats) == 2
    gate.set()
    page.wait_text(".turn.last .meta", "42 tokens")
    assert page.evaluate(f"{buttons}.every((button) => !button.disabled)")
    page.evaluate(f"document.querySelector('{EDITOR}').focus()")
    page.press("Enter")
    page.wait_text(".turn.last .answer", "New")
    assert sent(server) == ["Other"]
    assert shown(page) == [["Other", "New"]]


def test_after_a_fault_a_question_can_be_changed(page: Page, server: FakeServer) -> None:
    server.replies += [refusal(400, "too much", "context_length_exceeded"), answer("Fine.")]
    page.ask("Long")
    page.wait_text(".trouble", "too long")
    page.click(EDIT)
    change_text(page, "Short")
    page.press("Enter")
    page.wait_text(".turn.last .answer", "Fine.")
    assert page.count(".trouble") == 0
    assert sent(server) == ["Short"]


def test_editing_and_regenerating_without_a_mouse(page: Page, server: FakeServer) -> None:
    converse(page, server, 1)
    server.replies += [answer("Edited"), answer("Again")]
    for name, reply in (("Edit the question", "Edited"), ("Regenerate the answer", "Again")):
        page.evaluate("document.getElementById('messages').focus()")
        names: list[Any] = []
        while name not in names:
            assert len(names) < 6, names
            page.press("Tab")
            names.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none"
        page.press("Enter")
        if reply == "Edited":
            change_text(page, "Q")
            page.press("Enter")
        page.wait_text(".turn.last .answer", reply)
        page.wait_text(".turn.last .meta", "42 tokens")
        assert page.evaluate("document.activeElement.id") == "prompt"


def choose(page: Page, value: str) -> None:
    page.evaluate(
        f"document.getElementById('thinking').value = '{value}',"
        "document.getElementById('thinking').dispatchEvent(new Event('change'))"
    )


def test_thinking_is_switched(page: Page, server: FakeServer) -> None:
    page.wait("!document.getElementById('thinking').hidden")
    texts = "[...document.querySelectorAll('#thinking option')].map((n) => n.textContent)"
    assert page.evaluate(texts) == ["Thinking: default", "Thinking: on", "Thinking: off"]
    assert page.evaluate("document.getElementById('thinking').labels[0].innerText") == "Thinking"
    converse(page, server, 1)
    assert "chat_template_kwargs" not in server.chats[-1]
    for number, (value, is_on) in enumerate((("off", False), ("on", True)), 2):
        choose(page, value)
        reload(page)
        page.wait("!document.getElementById('thinking').hidden")
        assert page.evaluate("document.getElementById('thinking').value") == value
        page.click("#settings-button")
        page.click("#system")
        page.type("!")
        page.click("#settings .main")
        converse(page, server, number)
        assert server.chats[-1]["chat_template_kwargs"] == {"enable_thinking": is_on}
    choose(page, "off")
    server.replies.append(answer("Other"))
    page.click(f".turn.last {REGENERATE}")
    page.wait_text(".turn.last .answer", "Other")
    assert server.chats[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    page.wait_text(".turn.last .meta", "42 tokens")
    page.click("#settings-button")
    page.click("#forget")
    assert page.evaluate("document.getElementById('thinking').value") == "default"
    converse(page, server, 9)
    assert "chat_template_kwargs" not in server.chats[-1]


def test_a_model_that_cannot_switch_has_no_choice(page: Page, server: FakeServer) -> None:
    page.wait("!document.getElementById('thinking').hidden")
    choose(page, "off")
    assert server.status is not None
    working = server.status
    server.status = None
    page.wait_text("#state", "No answer")
    assert not page.evaluate("document.getElementById('thinking').hidden")
    server.status = working | {"switches_thinking": False}
    page.wait("document.getElementById('thinking').hidden")
    converse(page, server, 1)
    assert "chat_template_kwargs" not in server.chats[-1]
    del working["switches_thinking"]  # a server of another version
    server.status = working
    reload(page)
    page.wait_text("#state", "Ready")
    assert page.evaluate("document.getElementById('thinking').hidden")


def test_in_chinese_on_a_phone(browser: Chromium, server: FakeServer) -> None:
    assert server.status is not None
    server.status["switches_thinking"] = True
    server.replies += [answer("一"), answer("二"), answer("三")]
    look: dict[str, Any] = {"width": 390, "height": 844, "language": "zh-CN"}
    with browser.page(server.url, **look) as page:
        page.wait_text("#state", "就绪")
        page.wait("!document.getElementById('thinking').hidden")
        for text in ("问" * 200, "再问"):
            page.click("#prompt")
            page.type(text)
            page.click("#send")
            page.wait_text(".turn.last .question", text)
            page.wait_text(".turn.last .meta", "42")
        assert page.evaluate("document.querySelector('#thinking').innerText").split() == [
            "思考：默认",
            "思考：开",
            "思考：关",
        ]
        page.click(".question-foot button[aria-label='编辑问题']")
        page.wait_text(".question .quiet", "此问题之后的内容将被删除。")
        area = f"document.querySelector('{EDITOR}')"
        assert page.evaluate(f"{area}.clientHeight === {area}.scrollHeight")
        assert page.evaluate(f"parseFloat(getComputedStyle({area}).fontSize)") == 16
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.getElementById('messages').scrollWidth") == 390
        page.type("？")
        page.click(".question .buttons .main")
        page.wait_text(".turn.last .answer", "三")
        assert sent(server) == ["问" * 200 + "？"]
        title = "document.querySelector('.turn-foot .tool:nth-child(2)').title"
        assert page.evaluate(title) == "重新生成回答"
