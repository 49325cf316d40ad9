from __future__ import annotations

import signal

import pytest
import torch
import typer

from duoka import errors
from duoka.cli.errors import BROKEN_PIPE, DEFECT, redact, report

INTERRUPTED = 128 + signal.SIGINT


def classes() -> list[type[errors.DuokaError]]:
    found = [errors.DuokaError]
    for cls in found:
        found += cls.__subclasses__()
    return [cls for cls in found if cls.__module__ == errors.__name__]


def raised(error: Exception) -> Exception:
    """With a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_a_mistake_is_one_message_a_hint_and_its_code(
    cls: type[errors.DuokaError], capsys: pytest.CaptureFixture[str]
) -> None:
    code = report(cls("[bold] is not a size", hint="write 24GiB"), debug=False)
    assert code == cls.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: [bold] is not a size\nhint: write 24GiB\n"


def test_debug_shows_the_traceback_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(raised(errors.FleetError("no such GPU")), debug=True) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: no such GPU\n")


def test_a_defect_has_a_traceback_and_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(raised(ZeroDivisionError("oops")), debug=False) == DEFECT
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err
    assert "report" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, debug=False) == INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"


def test_a_full_gpu_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(torch.OutOfMemoryError("CUDA out of memory."), debug=False) == 12
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "smaller budget" in err


def test_codes_are_distinct() -> None:
    codes = [cls.exit_code for cls in classes()] + [
        DEFECT,
        128 + signal.SIGHUP,
        INTERRUPTED,
        128 + signal.SIGTERM,
        BROKEN_PIPE,
    ]
    assert len(set(codes)) == len(codes)


# ── what must not be shown ──

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


def test_secrets_of_modelscope_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "ms-0123abcd-0123-4567-89ab-0123456789ab"
    assert redact(f"401 for {token}, GET /x?auth_key=1-verysecret") == (
        "401 for ms-***, GET /x?auth_key=***"
    )
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "an-odd-one-of-a-company")
    assert redact("refused: an-odd-one-of-a-company.") == "refused: ***."


HARMLESS = [
    "File huggingface_hub/hf_api.py, in hf_hub_download",
    "the tokenizer has no special token <|user|>",
    "the prompt has 8 tokens; the plan has memory for 1",
    "new_tokens=8, max_tokens: 32, num_tokens = 7",
    "https://huggingface.co/org/model can't be reached",
    "model.layers.0.self_attn.k_proj.weight",
    "risk-free task-specific desk-lamp, ms-swift-fine-tuning",
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
                raise errors.CheckpointError(f"401 for {TOKEN}", hint=f"renew {TOKEN}") from cause
            raise ZeroDivisionError(f"token='{TOKEN}'") from cause
    except Exception as error:
        report(error, debug=debug)
    told = capsys.readouterr().err
    assert TOKEN[3:] not in told
    assert "***" in told
    assert ("Traceback" in told) == (debug or not known)
