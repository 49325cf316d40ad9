"""The options of a request ask for what was asked, word for word."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from duoka import Checkpoint, Workload
from duoka.cli import planning
from duoka.cli.main import run
from duoka.planner.command_line import change, options
from duoka.planner.request import PlanRequest
from duoka.tools.demo.checkpoint import CONFIG

LINES = (
    "",
    "--context 8K --new-tokens 100 --batch 3 --prefill-chunk none --trust-remote-code",
    "--max-context --new-tokens 8K --prefill-chunk 512 --cache dynamic",
    "--max-batch --context 2K --dtype fp16 --cache int8 --quantize auto",
    "--serve --sequences 7 --cache int8 --context 2K",
    "--serve --max-batch --prefill-chunk 512",
    "--serve --cache paged --no-graphs",
    "--serve --adapter sql=/run/sql --adapter law=/run/law",
    "--cache paged --batch 3 --context 2K",
    "--cache paged-int8 --max-batch",
    "--serve --max-context --new-tokens 100",
    "--images 2 --image-size 640x480 --objective latency --use-all",
    "--pin a=b=cuda:0 --pin c=1 --reserve cuda:0=2GiB --reserve cuda:1=1B",
    "--train full --optimizer sgd --checkpointing --packing --strategy balanced",
    "--train full --batch 6 --micro-batch 2 --schedule gpipe --context 64 --offload",
    "--offload --host-memory 64GB,60GB/s",
    "--host-memory 1000B",
    "--train lora --optimizer adamw8bit --lora-alpha 4 --rslora --lora-dropout 0.1",
    "--train lora --dpo --batch 6 --micro-batch 3",
    "--train lora --lora-rank 4 --lora-target q_proj --lora-target 'v proj'",
)
Ask = Callable[[str], PlanRequest]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What the program understands of options; nothing is planned."""
    model = tmp_path / "my model.json"
    model.write_text(json.dumps({**CONFIG, "seq_length": 2**17}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seen: list[PlanRequest] = []

    def note(checkpoint: Checkpoint, request: PlanRequest, *fleet_and_map: object) -> None:
        assert request.trust_remote_code == checkpoint.trust_remote_code
        seen.append(request)
        raise typer.Exit

    monkeypatch.setattr(planning, "plan_request", note)

    def understood(line: str) -> PlanRequest:
        assert run(shlex.split(line)[1:]) == 0
        return seen.pop()

    return understood


@pytest.mark.parametrize("line", LINES)
def test_the_same_is_asked_again(ask: Ask, line: str) -> None:
    start = "duoka plan 'my model.json' --gpus 2x24GiB"
    request = ask(f"{start} {line}")
    words = [word for option in options(request).values() for word in option]
    assert ask(shlex.join(["duoka", "plan", "my model.json", *words])) == request
    # Beside another problem only what differs is said.
    plain = replace(request, workload=Workload(prompt_tokens=9, new_tokens=9), largest=None)
    added, without = change(plain, request)
    assert {*added}.isdisjoint({"--gpus", "--objective", "--pin", "--offload", "--host-memory"})
    assert set(without) <= {"--context"}
    assert change(request, request) == ((), ())
