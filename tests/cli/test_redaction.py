from __future__ import annotations

import pytest

from duoka.cli import errors
from duoka.cli.redaction import redact
from duoka.errors import CheckpointError

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"

SECRET = [
    f"401 for {TOKEN}",
    f"headers: {{'authorization': 'Bearer {TOKEN}', 'user-agent': 'x'}}",
    f'{{"Authorization": "Basic {TOKEN}"}}',
    f"Authorization: {TOKEN}",
    f"authorization=Bearer {TOKEN}",
    f"curl -H 'Authorization: token {TOKEN}'",
    f"https://user:{TOKEN}@example.org/x",
    f"https://{TOKEN}@example.org/x",
    f"GET /x?X-Amz-Signature={TOKEN}&X-Amz-Expires=3600",
    f"GET /x?Expires=1&Signature={TOKEN}&Key-Pair-Id=K",
    f"GET /x?token={TOKEN}",
    f"Cookie: session={TOKEN}; other=1",
    f"hf_hub_download(repo, token='{TOKEN}')",
    f"token = '{TOKEN}'",
    f"{{'password': '{TOKEN}'}}",
    f"HF_TOKEN={TOKEN}",
    TOKEN,
]


@pytest.mark.parametrize("text", SECRET)
def test_secrets_are_not_shown(text: str) -> None:
    assert TOKEN not in redact(text)
    assert TOKEN[3:] not in redact(text)
    assert "***" in redact(text)


HARMLESS = [
    "File huggingface_hub/hf_api.py, in hf_hub_download",
    "the tokenizer has no special token <|user|>",
    "8 tokens of prompt; the plan has memory for 1",
    "new_tokens=8, max_tokens: 32, num_tokens = 7",
    "https://huggingface.co/org/model can't be reached",
    "model.layers.0.self_attn.k_proj.weight",
    "risk-free task-specific desk-lamp",
    "token_embedding: cuda:0",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def test_the_value_of_the_environment_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "an-odd-one-of-a-company")
    assert redact("refused: an-odd-one-of-a-company.") == "refused: ***."
    monkeypatch.setenv("HF_TOKEN", "0")
    assert redact("0 of 10") == "0 of 10"


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_errors_and_tracebacks_show_none(
    debug: bool, known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        try:
            raise ConnectionError(f"Bearer {TOKEN}")
        except ConnectionError as cause:
            if known:
                raise CheckpointError(f"401 for {TOKEN}", hint=f"renew {TOKEN}") from cause
            raise ZeroDivisionError(f"token='{TOKEN}'") from cause
    except Exception as error:
        errors.report(error, debug=debug)
    told = capsys.readouterr().err
    assert TOKEN[3:] not in told
    assert "***" in told
    assert ("Traceback" in told) == (debug or not known)
