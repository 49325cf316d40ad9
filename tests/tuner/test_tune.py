"""Runs of fine-tuning: the same numbers however the work is divided, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from safetensors.torch import load_file

import duoka
from duoka import TuneSettings
from duoka.errors import DuokaError, InfeasibleError, TrainingError
from duoka.tuner.prepare import TuneRun
from duoka.tuner.run import RunDirectory
from duoka.tuner.tune import TuneResult, export_result, move, resume

pytestmark = pytest.mark.dist

SETTINGS: dict[str, Any] = {"seq_length": 48, "batch": 8, "micro_batch": 1, "lr": 1e-2, "epochs": 2}
WHOLE = "virtual:256MiB"
ROWS = 16


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", ROWS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    written: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in written:
            written[family] = tuning.write_model(family, tmp_path_factory.mktemp(family))
        return written[family]

    return model


@pytest.fixture
def run(
    tmp_path: Path,
    chats: Path,
    models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    quick_start: None,
) -> Callable[..., TuneResult]:
    """Fine-tune; in this process where one is enough."""

    def tune(
        name: str,
        gpus: str = WHOLE,
        *,
        family: str = "shallow",
        replicas: int = 1,
        adapter: Path | None = None,
        rows: int = ROWS,
        **more: Any,
    ) -> TuneResult:
        data = tmp_path / f"{rows}.jsonl"
        data.write_text("".join(chats.read_text().splitlines(keepends=True)[:rows]))

        def start() -> TuneResult:
            return duoka.tune(
                models(family),
                str(data),
                gpus,
                save=tmp_path / name,
                replicas=replicas,
                adapter=adapter,
                settings=TuneSettings(**{**SETTINGS, **more}),
            )

        if gpus != WHOLE:
            return start()
        with tuning.one_process(monkeypatch):
            return start()

    return tune


def trained(result: TuneResult) -> dict[str, torch.Tensor]:
    """The tensors of an adapter or a checkpoint."""
    assert result.result is not None
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(result.result.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_alike(one: TuneResult, other: TuneResult) -> None:
    expected = tuning.losses(one.directory)
    assert len(expected) == one.steps == other.steps
    assert tuning.losses(other.directory) == pytest.approx(expected, rel=1e-4)
    here, there = trained(one), trained(other)
    assert here.keys() == there.keys()
    for name, value in here.items():
        difference = (value - there[name]).abs()
        if name.endswith("c_attn.bias"):
            # Softmax takes no notice of a bias of keys: its gradient is rounding, which AdamW makes
            # as large as any other.
            queries, _, values = difference.chunk(3)
            difference = torch.cat([queries, values])
        # AdamW divides by what may be next to nothing: single values differ by kernels' rounding.
        assert difference.mean() < 1e-4, name


SLOW = pytest.mark.slow
# Of the rows one half, in smaller batches: as many steps and epochs, fewer micro-batches.
SHORT: dict[str, Any] = {"rows": 8, "batch": 4}
AGAIN = {"checkpointing": True}
DROPOUT = {"lora_dropout": 0.5}
LAYOUTS = [
    pytest.param("shallow", "lora", "virtual:4x64MiB", 2, {"schedule": "gpipe"}, marks=SLOW),
    pytest.param("shallow", "full", "virtual:3x64MiB", 1, {"micro_batch": 2}, marks=SLOW),
    pytest.param("tied", "full", "virtual:2x64MiB", 1, AGAIN, marks=SLOW),
    pytest.param("tied", "lora", "virtual:4x64MiB", 2, {"packing": True, "epochs": 4}, marks=SLOW),
    pytest.param("experts", "full", "virtual:2x64MiB", 1, {"optimizer": "adafactor"}, marks=SLOW),
    pytest.param("experts", "lora", "virtual:2x64MiB", 2, {"dtype": "bfloat16"}, marks=SLOW),
    pytest.param("shallow", "lora", "virtual:2x64MiB", 1, DROPOUT),
    pytest.param("shallow", "lora", "virtual:4x64MiB", 2, DROPOUT, marks=SLOW),
    pytest.param(
        "llama", "lora", "virtual:3x64MiB", 1, {**DROPOUT, "checkpointing": True}, marks=SLOW
    ),
    pytest.param("drops", "full", "virtual:2x64MiB", 1, AGAIN, marks=SLOW),
]


@pytest.mark.parametrize(("family", "method", "gpus", "replicas", "more"), LAYOUTS)
def test_every_layout_learns_the_same(
    family: str, method: Any, gpus: str, replicas: int, more: Any, run: Any
) -> None:
    options = {"family": family, "method": method, **SHORT, **more}
    one = run("one", **options)
    other = run("other", gpus, replicas=replicas, **options)
    losses = tuning.losses(one.directory)
    assert losses[-1] < losses[0] - 0.3
    assert_alike(one, other)


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (WHOLE, {"dtype": "bfloat16"}),
        pytest.param("virtual:2x64MiB", {"dtype": "bfloat16", **AGAIN}, marks=SLOW),
        pytest.param(WHOLE, {"method": "qlora"}, marks=SLOW),
        pytest.param(WHOLE, {"quantize": "int8"}, marks=SLOW),
    ],
)
def test_experts_on_the_host_learn_the_same(gpus: str, more: Any, run: Any) -> None:
    """The router and attention get the same gradients, up to rounding."""
    targets = "q_proj", "k_proj", "v_proj", "o_proj"
    options = {"family": "experts", "lora_target": targets, **SHORT, **more}
    one = run("one", **options)
    other = run("other", gpus, experts="host", host_memory="1GiB", **options)
    expected = tuning.losses(one.directory)
    assert expected[-1] < expected[0] - 0.2
    assert tuning.losses(other.directory) == pytest.approx(expected, rel=0.02)


# ── an adapter trained on ──


@pytest.mark.parametrize("gpus", [WHOLE, pytest.param("virtual:2x64MiB", marks=SLOW)])
def test_an_adapter_is_trained_on(gpus: str, run: Any) -> None:
    # Scaled by no whole number over the rank, as rank-stabilised adapters are.
    shape = {"lora_rank": 4, "lora_target": ("q_proj", "down_proj")}
    first = run("first", **shape)
    config = first.result / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "lora_alpha": 7.5}))

    second = run("second", gpus, adapter=first.result, lr=1e-12, steps=1)

    assert second.steps == 1
    for name, value in trained(first).items():
        torch.testing.assert_close(trained(second)[name], value)
    made = json.loads((second.result / "adapter_config.json").read_text())
    assert (made["r"], made["lora_alpha"]) == (4, 7.5)
    assert sorted(made["target_modules"]) == ["down_proj", "q_proj"]
    # It begins where the first one ended, not anew.
    assert tuning.losses(second.directory)[0] < tuning.losses(first.directory)[0] - 0.2


@pytest.mark.slow
def test_an_adapter_of_another_model_is_refused(run: Any, tmp_path: Path) -> None:
    adapter = run("first", steps=1).result
    for more, message in (
        ({"family": "large"}, "the adapter doesn't match this model"),
        ({"method": "full"}, "training"),
    ):
        with pytest.raises(DuokaError, match=message):
            run("second", adapter=adapter, **more)
    with pytest.raises(DuokaError, match="has no adapter"):
        run("second", adapter=tmp_path)
    assert not (tmp_path / "second").exists()


# ── resuming ──


def start(
    directory: Path, model: Path, chats: Path, gpus: str, *more: str, python: str | None = None
) -> subprocess.Popen[str]:
    """A run in a process of its own, which can be killed."""
    command = [
        *(python or sys.executable, "-c", "from duoka.cli import main; main()"),
        *("tune", str(model), str(chats), "--gpus", gpus),
        *("--save", str(directory), "--context", "48", "--batch", "8", "--epochs", "4"),
        *("--lr", "1e-2", "--save-every", "2", *more),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.slow
def test_a_run_goes_on_wherever_it_was_killed(
    python: str,
    tmp_path: Path,
    chats: Path,
    models: Any,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run("whole", epochs=4)
    path = tmp_path / "killed"
    # The program and its processes are started as people start them, and are no forks.
    process = start(
        path, models("shallow"), chats, "virtual:2x64MiB", "--replicas", "2", python=python
    )
    wait_for(path / "checkpoints" / "step-000002", process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == TrainingError.exit_code
    assert "was ended by SIGKILL" in said
    assert "--resume" in said
    assert not (path / "adapter").exists()

    # The newest checkpoint is damaged as well: the one before serves, on one GPU and on three.
    moved = shutil.copytree(path, tmp_path / "moved")
    newest = sorted((path / "checkpoints").glob("step-*"))[-1]
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    if newest.name == "step-000002":
        shutil.rmtree(newest)
    with tuning.one_process(monkeypatch):
        move(RunDirectory(path), WHOLE, 1)
        assert_alike(whole, resume(RunDirectory(path)))
    move(RunDirectory(moved), "virtual:3x64MiB", 1)
    assert_alike(whole, resume(RunDirectory(moved)))


# Too many epochs to come to their end before the signal.
LONG = ("--epochs", "400")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_ctrl_c_saves_and_leaves(tmp_path: Path, chats: Path, models: Any) -> None:
    path = tmp_path / "stopped"
    process = start(path, models("shallow"), chats, "virtual:2x64MiB", "--replicas", "1", *LONG)
    wait_for(path / "checkpoints" / "step-000002", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    steps = len(tuning.losses(path))
    assert f"stopped after step {steps}" in said
    assert (path / "checkpoints" / f"step-{steps:06d}").is_dir()
    # The adapter so far is that of the checkpoint.
    adapter = load_file(path / "adapter" / "adapter_model.safetensors")
    exported = load_file(export_result(path) / "adapter_model.safetensors")
    assert adapter.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in adapter.items())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_ctrl_c_twice_says_what_was_saved(tmp_path: Path, chats: Path, models: Any) -> None:
    path = tmp_path / "stopped"
    more = ("--save-every", "1000", *LONG)
    process = start(path, models("shallow"), chats, "virtual:2x64MiB", *more)
    wait_for(path / "metrics.jsonl", process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    saved = [int(step.name.removeprefix("step-")) for step in path.glob("checkpoints/step-*")]
    assert f"stopped after step {max(saved, default=0)};" in said


# ── sequences ──


def test_sequences_are_as_long_as_the_longest_sample(
    tmp_path: Path, chats: Path, models: Any
) -> None:
    runs: list[TuneRun] = []

    def start(gpus: str, **more: Any) -> None:
        duoka.tune(
            models("shallow"), str(chats), gpus, save=tmp_path / "run", replicas=1,
            settings=TuneSettings(**{**SETTINGS, "seq_length": None, **more}),
            show=lambda run: bool(runs.append(run)),
        )  # fmt: skip

    start(WHOLE, eval_data=(str(chats),))
    longest = int(runs[0].samples.lengths.max())
    planned = runs[0].plans[0].workload.prompt_tokens
    assert longest <= planned < longest + 8
    assert runs[0].settings.seq_length == planned
    assert runs[0].eval_samples is not None
    assert runs[0].samples.seq_length == runs[0].eval_samples.seq_length == planned
    start(WHOLE, packing=True)
    assert runs[1].plans[0].workload.prompt_tokens == tuning.SIZES["max_position_embeddings"]
    with pytest.raises(InfeasibleError, match=rf"longest sample has {longest} tokens .*jsonl:\d+"):
        start("virtual:600KiB")
    assert not (tmp_path / "run").exists()


def test_data_are_read_as_the_settings_say(tmp_path: Path, chats: Path, models: Any) -> None:
    """Columns and the maximum of samples; weights are those of files for training only."""
    runs: list[TuneRun] = []
    rows = [{"ask": "a", "say": "b"}, {"ask": "c", "say": "d"}, {"ask": "e", "say": "f" * 200}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"prompt": "ask", "response": "say"}
    more = {"columns": columns, "max_samples": 6, "eval_data": (str(tmp_path / "a.jsonl"),)}
    duoka.tune(
        models("shallow"), [str(chats), f"{tmp_path / 'a.jsonl'}=2"], WHOLE, save=tmp_path / "run",
        replicas=1, settings=TuneSettings(**{**SETTINGS, **more}),
        show=lambda run: bool(runs.append(run)),
    )  # fmt: skip
    (run,) = runs
    assert run.samples.file_numbers.tolist() == [0, 0, 0, 1, 1]
    assert len(run.samples.draw(0, 0)) == 3 + 2 * 2
    assert [(row.line, row.kind) for row in run.samples.bad_rows] == [(3, "too long")]
    assert run.eval_samples is not None
    assert (len(run.eval_samples), run.eval_samples.weights) == (2, ())


# ── what goes wrong ──


@pytest.mark.slow
def test_out_of_memory_in_one_process_ends_all(
    tmp_path: Path, run: Any, own_workspaces: None
) -> None:
    path = tmp_path / "run"
    run("run", "virtual:2x64MiB", family="llama", epochs=1, micro_batch=8)
    content = json.loads((path / "run.json").read_text())
    content["settings"]["epochs"] = 2
    for device in content["plans"][0]["fleet"]["devices"]:
        device["budget_bytes"] = 2**21 if device["name"] == "vgpu:1" else device["budget_bytes"]
    for stage in content["plans"][0]["forecast"]["devices"]:
        stage["budget_bytes"] = 2**21 if stage["device"] == "vgpu:1" else stage["budget_bytes"]
        if stage["device"] == "vgpu:1":
            stage |= dict.fromkeys(
                ("weight_bytes", "kv_cache_bytes", "activation_bytes", "gradient_bytes",
                 "optimizer_bytes", "allocated_bytes", "reserved_bytes", "requested_bytes"), 0,
            )  # fmt: skip
    (path / "run.json").write_text(json.dumps(content))
    with pytest.raises(DuokaError, match="out of memory") as stopped:
        resume(RunDirectory(path))
    assert stopped.value.exit_code == TrainingError.exit_code
    assert (path / "checkpoints" / "step-000002").is_dir()
