"""What hostile, slow and absent clients do to a server: nothing."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from pathlib import Path
from typing import Any

import pytest
from abuse import (
    CHAT,
    COMPLETIONS,
    VALID,
    exchange,
    look,
    message,
    message_of,
    num_descriptors,
    settled,
    vanish,
)
from fuzzing import damaged, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Served, serving

CHAT_REQUEST = VALID[CHAT]


def ask(served: Served, data: bytes) -> tuple[int, bytes]:
    return asyncio.run(exchange(served.url, data))


def check_unharmed(served: Served) -> None:
    """It answers, nothing is open in it, and nothing was told but at its start."""
    status = settled(served.url)
    assert status["engines"][0]["state"] == "ready"
    assert status["running"] == status["waiting"] == 0
    assert status["pages"]["free"] == status["pages"]["total"]
    code, answer = ask(served, message_of(CHAT, CHAT_REQUEST))
    assert code == 200, answer
    log = served.log.read_text()
    assert "Traceback" not in log
    assert "Exception" not in log


@pytest.mark.fuzz
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_requests_are_refused_in_its_own_words(served: Served, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(VALID)))
    body = data.draw(damaged(VALID[path]))
    code, answer = ask(served, message_of(path, body))
    assert 200 <= code < 500, answer
    if code >= 400:
        content = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
        assert content["error"]["message"]
        assert len(answer) < 8192
    assert look(served.url)["engines"][0]["state"] == "ready"


def nested(number: int) -> bytes:
    return (
        b'{"messages":[{"role":"user","content":"a","x":' + b"[" * number + b"]" * number + b"}]}"
    )


def text_in(path: str, text: str) -> bytes:
    body = {"messages": [{"role": "user", "content": "@"}]} if path == CHAT else {"prompt": "@"}
    return message(path, json.dumps(body).replace("@", text).encode())


CASES: dict[str, tuple[bytes, int]] = {
    "negative token": (message_of(COMPLETIONS, {"prompt": [-1, 2]}), 400),
    "token beyond": (message_of(COMPLETIONS, {"prompt": [10**30]}), 400),
    "half a pair in a prompt": (text_in(COMPLETIONS, "\\ud800"), 400),
    "half a pair in a message": (text_in(CHAT, "\\udc00"), 400),
    "a whole pair": (text_in(CHAT, "\\ud83d\\ude00"), 200),
    "half a pair in a key": (message(CHAT, b'{"messages": [], "\\ud800": 1}'), 400),
    "deep": (message(CHAT, nested(900)), 400),
    "deeper": (message(CHAT, nested(100_000)), 400),
    "many objects": (message(CHAT, b'{"messages":[' + b"{}," * 500_000 + b"{}]}"), 400),
    "brackets in a text": (text_in(CHAT, "[" * 50), 200),
    "an open quote": (message(CHAT, b'"' * 2**20), 400),
    "many digits": (message(CHAT, b'{"seed":' + b"9" * 5000 + b"}"), 400),
    "endless prompt": (text_in(COMPLETIONS, "ab " * 3_000_000), 400),
    "endless chat": (text_in(CHAT, "ab " * 3_000_000), 400),
    "encoded": (message_of(CHAT, CHAT_REQUEST, "Content-Encoding: gzip"), 415),
    "announced": (message(CHAT, b"", "Content-Length: 99999999999"), 413),
    "not UTF-8": (message(CHAT, b'{"messages": "\xff"}'), 400),
    "another method": (message(CHAT, b"", method="BREW"), 405),
    "two lengths": (message(CHAT, b"{}", "Content-Length: 2", "Content-Length: 3"), 400),
    "no HTTP": (b"\x16\x03\x01\x02\r\n\r\n", 400),
    "another protocol": (message("/", b"", "Connection: Upgrade", "Upgrade: websocket"), 405),
}


@pytest.mark.parametrize("name", CASES)
def test_each_has_a_status_of_its_own(served: Served, name: str) -> None:
    data, status = CASES[name]
    code, answer = ask(served, data)
    if name == "another protocol":  # a page is there, or none
        status = code if code in (404, 405) else status
    assert code == status, answer[:500]
    assert len(answer) < 8192


def test_an_error_repeats_little_of_what_was_sent(served: Served) -> None:
    for body in ({**CHAT_REQUEST, "x" * 10**6: 1}, {**CHAT_REQUEST, "model": "x" * 10**6}):
        code, answer = ask(served, message_of(CHAT, body))
        assert code in (400, 404)
        assert len(answer) < 4096


def test_a_body_in_pieces_has_the_same_limit(served: Served) -> None:
    head = message(CHAT, b"", "Transfer-Encoding: chunked")
    code, answer = ask(served, head + (b"100000\r\n" + b"x" * 0x100000 + b"\r\n") * 33)
    # Where we still send while it closes, the answer can be lost on the way.
    assert code in (0, 413), answer
    check_unharmed(served)


def test_a_flood_of_headers_is_refused(served: Served) -> None:
    lines = [f"X-{number}: a" for number in range(20_000)]
    code, _ = ask(served, message(CHAT, b"{}", *lines))
    assert code in (0, 431)
    check_unharmed(served)


def test_pipelined_requests_are_answered_in_turn(served: Served) -> None:
    health = message("/health", b"", method="GET")

    async def count() -> int:
        _, answer = await exchange(served.url, health * 50 + health.replace(b"health", b"nothing"))
        return answer.count(b"200 OK")

    assert asyncio.run(count()) in (1, 50)  # the first closes, where it is believed
    check_unharmed(served)


async def all_vanish(url: str, number: int) -> dict[str, int]:
    rng = random.Random(0)
    kinds = await asyncio.gather(*(vanish(url, rng) for _ in range(number)))
    return {kind: kinds.count(kind) for kind in set(kinds)}


@pytest.mark.parametrize("number", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_who_goes_away_leaves_nothing(served: Served, number: int) -> None:
    before = num_descriptors(served.pid)
    assert len(asyncio.run(all_vanish(served.url, number))) == 7
    check_unharmed(served)
    assert num_descriptors(served.pid) <= before + 2


GRAMMARS: dict[str, Any] = {
    "nested repeats, which cost nothing before they match": {
        "type": "regex",
        "regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}",
    },
    "long": {"type": "regex", "regex": "(a|b)" * 20_000},
    "many references": {
        "type": "json_schema",
        "json_schema": {
            "schema": {
                "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(600)},
                "$ref": "#/$defs/d0",
            }
        },
    },
    "unknown": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}},
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_explode_cost_nothing(served: Served, name: str) -> None:
    code, answer = ask(
        served, message_of(CHAT, {**CHAT_REQUEST, "response_format": GRAMMARS[name]})
    )
    assert code == (200 if name.startswith("nested") else 400), answer
    assert look(served.url)["engines"][0]["state"] == "ready"


def test_nothing_was_told_and_nothing_is_left(served: Served) -> None:
    check_unharmed(served)


@pytest.mark.slow
def test_keys_and_prompts_stay_out_of_the_log(llama: Path, tmp_path: Path) -> None:
    key, prompt = secrets.token_hex(16), secrets.token_hex(8)
    (tmp_path / "key").write_text(key)
    body = {**CHAT_REQUEST, "messages": [{"role": "user", "content": prompt}]}
    with serving(llama, tmp_path / "log", "--api-key-file", str(tmp_path / "key")) as served:
        for said in ("", key[:-1], key + "0", "é", "\xff" * 100):
            code, _ = ask(served, message_of(CHAT, body, f"Authorization: Bearer {said}"))
            assert code == 401
        for header in (f"Authorization: Bearer {key}", f"x-api-key: {key}"):
            assert ask(served, message_of(CHAT, body, header))[0] == 200
            bad = {**body, prompt: 1, "stream": "no"}
            assert ask(served, message_of(CHAT, bad, header))[0] == 400
        log = served.log.read_text()
    assert "loading" in log
    assert key not in log
    assert prompt not in log
