"""CONTRIBUTING's three journeys are true: each function is called, in the order of the page."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch.distributed as dist
import trainers
import tuning
from checkpoints import write_random

import duoka
from duoka import TuneSettings
from duoka.tools.demo.checkpoint import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_sequences")]

ROOT = Path(__file__).resolve().parents[1]
SOURCE = str(ROOT / "src" / "duoka") + "/"
TINY = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3, "num_attention_heads": 4}
TINY |= {"kv_channels": 16, "padded_vocab_size": 1536}


def listed(title: str) -> list[str]:
    """The functions of a journey's table."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"### {title}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)


@contextmanager
def watch(functions: list[str]) -> Iterator[list[str]]:
    """Collect the calls of some functions, in order and in all threads."""
    calls: list[str] = []
    wanted = frozenset(functions)

    # Called once for each Python function; a profile function would also be for returns and C.
    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(SOURCE):
            module = code.co_filename.removeprefix(SOURCE).removesuffix(".py").replace("/", ".")
            if (name := f"{module}.{code.co_qualname}") in wanted:
                calls.append(name)

    sys.settrace(note)
    threading.settrace(note)
    try:
        yield calls
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def follow(title: str, journey: Callable[[], object]) -> None:
    functions = listed(title)
    assert 8 < len(functions) <= 12
    with watch(functions) as calls:
        journey()
    rest = iter(calls)
    assert [function for function in functions if function not in rest] == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("journeys") / "model", {**CONFIG, **TINY}, seed=3)


def test_a_plan_and_a_token(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    workload = duoka.Workload(cache="paged", batch=2, prompt_tokens=40, new_tokens=8)
    plans: list[duoka.Plan] = []
    fleet = "virtual:2x64MiB"
    follow("How a plan is made", lambda: plans.append(duoka.plan(model, fleet, workload)))

    def generate() -> None:
        with duoka.Engine(plans[0], processes=False) as engine:
            engine.generate(["hi"], duoka.SamplingParams(max_new_tokens=2, seed=1))

    follow("How a token is generated", generate)


def test_a_step_of_training(tmp_path: Path) -> None:
    path = tuning.write_model("shallow", tmp_path / "model")
    settings = TuneSettings(batch=4, micro_batch=1, method="full")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        follow("How a step is trained", lambda: trainers.train(path, trainers.Case(settings)))
    finally:
        dist.destroy_process_group()
