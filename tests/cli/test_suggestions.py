"""What the user sees of ways out: commands that work when they are pasted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rehearsing
import tiny as tiny_profiles
from tiny import MIB

from duoka import Checkpoint, Plan, Workload
from duoka.cli.main import run
from duoka.cli.suggestions import command_line, format_suggestions
from duoka.errors import InfeasibleError, WayOut
from duoka.forecast.optimizer_memory import TrainedTensor
from duoka.forecast.profile import Profile
from duoka.forecast.profile_cache import keep_profile
from duoka.forecast.workload import Training

from .conftest import TINY


def way(*options: str, without: tuple[str, ...] = (), **more: Any) -> WayOut:
    numbers: dict[str, Any] = {"context_tokens": 9, "batch": 1, "num_gpus": 1, "free_bytes": 1024}
    return WayOut(
        kind="context", text="a way", options=options, without=without, **{**numbers, **more}
    )


@pytest.mark.parametrize(
    ("given", "change", "expected"),
    [
        ("plan m --context 8K --batch 2", way("--context", "64"), "plan m --batch 2 --context 64"),
        ("plan m --context=8K", way("--context", "64"), "plan m --context 64"),
        ("plan m --device-map a.json -x", way(without=("--device-map",)), "plan m -x"),
        (
            "plan m --checkpointing --batch 2",
            way(without=("--checkpointing",)),
            "plan m --batch 2",
        ),
        ("plan m", way("--offload"), "plan m --offload"),
        ("--debug plan m", way("--gpus", "A B"), "--debug plan m --gpus 'A B'"),
    ],
)
def test_commands_are_the_one_given_but_for_the_way(
    given: str, change: WayOut, expected: str
) -> None:
    assert command_line(shlex.split(given), change) == f"duoka {expected}"


def test_a_saved_plan_has_to_be_made_anew() -> None:
    arguments = ["plan", "--plan", "a.plan", "--replan"]
    assert command_line(arguments, way("--batch", "2")) == "duoka plan … --batch 2"


def test_lines_are_as_narrow_as_the_terminal_and_commands_whole() -> None:
    ways = [
        way("--context", "64", loses="very much indeed, and more than anybody would like"),
        way("--offload"),
        way("--train", "lora"),
    ]
    error = InfeasibleError("x", ways_out=ways)
    model = "a-long-name-of-a-model" * 4
    text = format_suggestions(error.ways_out, ["plan", model], {"--context", "--offload"}, 40)
    assert text is not None
    lines = text.splitlines()[1:]
    assert lines[0] == "  1. a way"
    assert f"     duoka plan {model} --context 64" in lines
    assert all(len(line) <= 40 for line in lines if "duoka" not in line)
    assert "--train" not in text  # which this command doesn't have
    assert format_suggestions(error.ways_out, ["check", model], set(), 40) is None


WEIGHTS = [60 * MIB, *[40 * MIB] * 6, 60 * MIB]
SHARES = {"none": 1.0, "int8": 0.5, "int4": 0.25, "nf4": 0.25}


def answering(workload: Workload) -> Profile:
    """A made-up model, its weights and cache in so many bits."""
    weights = [int(size * SHARES[workload.quantize]) for size in WEIGHTS]
    cache = 1024 if workload.cache == "int8" else 2048
    return tiny_profiles.made_up(weights, tiny_profiles.Costs(cache=cache, work=20_000))


def learning(workload: Workload) -> Profile:
    """The same in training: adapters are small, and what is computed again isn't kept."""
    training = workload.training
    assert training is not None
    saved = 2_000 if training.gradient_checkpointing else 30_000
    share = 512 // training.lora_rank if training.method == "lora" else 1
    layers = [rehearsing.Layer(size // share, 4_000, saved) for size in WEIGHTS]
    profile = rehearsing.made_up(layers)
    weights = [int(size * SHARES[workload.quantize]) for size in WEIGHTS]
    kinds = []
    for kind, size, layer in zip(profile.kinds, weights, layers, strict=True):
        matrix = TrainedTensor(shape=(512, layer.weight // 1024), item_bytes=2)
        kinds.append(replace(kind, weight_bytes=(size,), trained=(matrix,)))
    return replace(profile, kinds=tuple(kinds))


TRAININGS: list[tuple[Any, dict[str, Any]]] = [
    ("none", {"method": "full"}),
    *((form, {"lora_rank": rank}) for form in ("none", "int8", "nf4") for rank in (8, 256)),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model to plan for whose profiles are all in the cache, made up."""
    folder = tmp_path_factory.mktemp("made-up")
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, "torch_dtype": "bfloat16", "seq_length": 8_192}))
    checkpoint = Checkpoint.open(path)
    work = Workload(dtype="bfloat16")
    kinds = [
        replace(work, cache=cache, quantize=quantize)
        for cache in ("dynamic", "int8")
        for quantize in ("none", "int8", "int4")
    ]
    kinds += [
        replace(
            work,
            new_tokens=0,
            quantize=quantize,
            training=Training(
                gradient_checkpointing=again, master_weights=True, rows="unpadded", **training
            ),
        )
        for quantize, training in TRAININGS
        for again in (False, True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOKA_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "80")
        for kind in kinds:
            profile = answering(kind) if kind.training is None else learning(kind)
            profile = replace(
                profile,
                fingerprint=checkpoint.fingerprint,
                conditions=kind.conditions,
                max_context_tokens=8_192,
            )
            keep_profile(profile, kind)
        yield path


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("--gpus 270MiB,250MiB --context 3K --batch 4", "context batch int8 int4 offload gpu"),
        ("--gpus 600MiB --context 8K --prefill-chunk none", "context chunk cache int8 offload gpu"),
        # Two at once, where one alone won't do.
        ("--gpus 300MiB --context 8K --prefill-chunk none", "int8 int4 gpu"),
        ("--gpus 240MiB --max-batch --context 8K", "int4 gpu"),
        ("--gpus 120MiB,100MiB --replicas 2 --context 3K", "int4 gpu"),
        ("--gpus 60MiB --quantize auto --context 2K", "gpu"),
        (
            "--gpus 2GiB --train full --micro-batch 8 --context 512",
            "batch checkpointing optimizer lora context",
        ),
        ("--gpus 1500MiB --train full --context 512", "optimizer lora gpu"),
        ("--gpus 1000MiB --train full --context 512", "optimizer lora gpu"),
        ("--gpus 300MiB --train full --context 512", "int8 nf4 gpu"),
        ("--gpus 280MiB --train lora --context 512", "int8 nf4 gpu"),
        ("--gpus 950MiB --train lora --lora-rank 256 --context 512", "optimizer rank int8 gpu"),
        ("--gpus 800MiB --train lora --micro-batch 8 --context 2K", "batch context gpu"),
    ],
)
def test_every_way_is_what_its_command_makes(
    config: Path, capsys: pytest.CaptureFixture[str], asked: str, kinds: str
) -> None:
    assert run(["plan", str(config), *shlex.split(asked), "--json"]) == 7
    out, err = capsys.readouterr()
    ways = json.loads(out)["ways_out"]
    assert {*kinds.split()} <= {each["kind"] for each in ways}
    lines = [line.strip() for line in err.splitlines() if line.startswith("     duoka ")]
    assert len(lines) == len(ways)
    for line, each in zip(lines, ways, strict=True):
        assert run(shlex.split(line)[1:]) == 0, line
        plan = Plan.from_json(capsys.readouterr().out)
        assert each["context_tokens"] == plan.workload.context_tokens, line
        assert each["batch"] == plan.workload.batch, line
        assert each["prefill_chunk_tokens"] == plan.workload.prefill_chunk_tokens, line
        assert each["num_gpus"] == len(plan.devices), line
        assert each["free_bytes"] == min(d.free_bytes for d in plan.forecast.devices), line


@pytest.mark.slow
def test_offload_on_the_command_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tiny), "--gpus", "virtual:64MiB", "--offload", "--context", "96"]) == 0
    assert "CPU memory" not in capsys.readouterr().out
    assert run(["plan", str(tiny), "--gpus", "virtual:64MiB", "--offload", "--train", "lora"]) == 2
    assert "can't be trained" in capsys.readouterr().err
