"""`duoka serve` over CUDA: requests in as much memory as was forecast, until a GPU is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from served import Served, serving
from tuning import write_model

pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB", context="40MiB")
NEW_TOKENS = 12
MODEL: Any = {"model": "llama", "temperature": 0, "max_tokens": NEW_TOKENS}
HI: Any = [{"role": "user", "content": "hi"}]
LONG = "a" * 200
SIZES = ("--context", "128", "--sequences", "4", "--dtype", "bfloat16", "--use-all")


@contextmanager
def client_of(path: Path, gpus: str) -> Iterator[tuple[OpenAI, Served]]:
    """Serve a small model on GPUs."""
    model, log = write_model("llama", path / "llama"), path / "log"
    with (
        serving(model, log, gpus=("--gpus", gpus, *SIZES)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, served


def ask(client: OpenAI) -> Any:
    return client.chat.completions.create(messages=HI, **MODEL)


def status_of(served: Served) -> Any:
    return httpx2.get(f"{served.url}/duoka/status").json()


def measured_devices(served: Served) -> list[dict[str, Any]]:
    """Return each device of the engine once it has told what it measures."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        (engine,) = status_of(served)["engines"]
        devices: list[dict[str, Any]] = engine["devices"]
        if all(device["reserved_bytes"] for device in devices):
            return devices
        time.sleep(0.1)
    raise AssertionError(f"no measured bytes: {devices}")


@pytest.mark.parametrize("gpus", ["0", "0,1"])
def test_requests_are_answered_in_forecast_memory(gpus: str, tmp_path: Path) -> None:
    """Streamed or not, one at a time or several; a prompt that is too long is refused."""
    with client_of(tmp_path, gpus) as (client, served):
        answer = ask(client)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == NEW_TOKENS
        assert answer.choices[0].finish_reason == "length"
        text = answer.choices[0].message.content
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(messages=HI, **MODEL, **options))
        parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(parts) == text
        assert chunks[-1].usage == answer.usage
        # More than run at a time, each with a prefix of another length.
        prompts = [LONG[:length] for length in (1, 30, 60, 90, 100, 110)]
        several = client.completions.create(prompt=prompts, **MODEL)
        assert several.usage is not None
        assert several.usage.completion_tokens == len(prompts) * NEW_TOKENS
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt=LONG, **MODEL)
        assert refused.value.code == "context_length_exceeded"
        devices = measured_devices(served)
        assert [device["name"] for device in devices] == [f"cuda:{gpu}" for gpu in gpus.split(",")]
        for device in devices:
            assert device["reserved_bytes"] == device["forecast_bytes"], device
        assert httpx2.get(f"{served.url}/ready").status_code == 200
    assert "Traceback" not in served.log.read_text()


@pytest.mark.cuda_rig(lost="0@16000")
def test_a_lost_gpu_is_told_to_clients(tmp_path: Path) -> None:
    """The request fails with 503; the server isn't ready, and says why.

    Warm-up takes 14,000 launches and copies, a request 214.
    """
    with client_of(tmp_path, "0") as (client, served):
        with pytest.raises(openai.InternalServerError) as failed:
            list(map(ask, itertools.repeat(client)))
        assert (failed.value.status_code, failed.value.code) == (503, "engine_died")
        assert "a GPU has failed: CUDA error: " in str(failed.value)
        assert httpx2.get(f"{served.url}/ready").status_code == 503
        (engine,) = status_of(served)["engines"]
        assert engine["reason"].startswith("a GPU has failed: CUDA error: ")
    said = served.log.read_text()
    assert "engine 0 has ended: a GPU has failed: CUDA error: " in said
    assert "Traceback" not in said
