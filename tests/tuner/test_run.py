"""The directory of a run: written, believed, taken back, and what of it may be damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuning
from saving import files_of_at_most
from trainers import make_layout, write_run

from duoka import TuneSettings
from duoka.errors import DuokaError, FormatError, MachineError, TrainingError, UsageError
from duoka.tuner.layout import Layout
from duoka.tuner.run import RunDirectory, TuneJob
from duoka.tuner.tune import move, resume

SETTINGS = TuneSettings(seq_length=32, batch=4, lora_target=("q_proj",), eval_data=("é.jsonl",))


@pytest.fixture
def layout(llama: Path) -> Layout:
    return make_layout(llama, SETTINGS, stages=2, replicas=2)


@pytest.fixture
def directory(tmp_path: Path, layout: Layout) -> RunDirectory:
    """One that is written."""
    directory = RunDirectory(tmp_path / "run")
    write_run(directory, SETTINGS, layout)
    return directory


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ── what is to be done ──


@pytest.mark.parametrize("trusts", [False, True])
def test_it_is_read_as_it_was_written(
    tmp_path: Path, layout: Layout, llama: Path, trusts: bool
) -> None:
    directory = RunDirectory(tmp_path)
    assert not directory.is_written
    directory.write(SETTINGS, layout.plans, trust_remote_code=trusts)
    assert directory.is_written
    run = directory.read()
    assert run == TuneJob(settings=SETTINGS, plans=layout.plans, trust_remote_code=trusts)
    assert run.fleet().names == ("vgpu:0", "vgpu:1", "vgpu:2", "vgpu:3")
    several_machines = TuneJob(settings=SETTINGS, plans=layout.plans * 2)
    assert several_machines.fleet() == run.fleet()
    checkpoint = run.checkpoint()
    assert checkpoint.path == llama
    assert checkpoint.trust_remote_code == trusts


def test_the_model_has_to_be_the_one_that_was_planned_for(
    tmp_path: Path, llama: Path, layout: Layout
) -> None:
    copied = shutil.copytree(llama, tmp_path / "model")
    plans = tuple(replace(plan, source=str(copied)) for plan in layout.plans)
    run = TuneJob(settings=SETTINGS, plans=plans)
    assert run.checkpoint().path == copied
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(FormatError, match="is not the checkpoint of the plan"):
        run.checkpoint()


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (b"", "not valid JSON"),
        (b"[]", "contains a JSON list; expected an object"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b"{}", "is damaged, or was written by another version of duoka"),
        (b"\xff{}", "it is not UTF-8 text: byte 0 is 0xff"),
        (lambda c: c.update(format="duoka.plan"), "was written by another version of duoka"),
        (lambda c: c.update(version=2), "was written by another version of duoka"),
        (lambda c: c.pop("plans"), "has no plan"),
        (lambda c: c["plans"].append(7), "the plan contains a JSON number"),
        (lambda c: c["plans"][1].pop("value"), "Plan.value: the field is missing"),
        (
            lambda c: c["plans"][0]["workload"].update(training=None, new_tokens=1),
            "or one that isn't for training",
        ),
        (lambda c: c.pop("settings"), "TuneSettings: expected an object, got"),
        (lambda c: c["settings"].update(batch="8"), "TuneSettings.batch: expected an"),
        (lambda c: c["settings"].update(batch=0), "batch is 0; it must be at least 1"),
        (lambda c: c["settings"].update(other=1), "TuneSettings.other: unknown field"),
    ],
)
def test_what_is_damaged_or_foreign_is_refused(
    directory: RunDirectory, damage: bytes | Change, problem: str
) -> None:
    file = directory.path / "run.json"
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        content = json.loads(file.read_text())
        damage(content)
        file.write_text(json.dumps(content))
    with pytest.raises(FormatError) as refused:
        directory.read()
    assert problem in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("name", ["absent", "file", "empty"])
def test_what_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{name} is not the directory of a run") as refused:
        RunDirectory(tmp_path / name).read()
    assert "`duoka tune --save`" in (refused.value.hint or "")


# ── a new one ──


def test_a_new_one_takes_no_place_that_is_taken(directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (directory.path, tmp_path / "file"):
        with pytest.raises(UsageError, match=f"{path} already exists") as refused:
            RunDirectory(path).refuse_used()
        assert "--resume" in (refused.value.hint or "")
    inner = RunDirectory(tmp_path / "file" / "inner")
    with (
        pytest.raises(MachineError, match=r"inner/.lock can't be written: Not a directory"),
        inner.locked(),
    ):
        pass


def test_one_that_made_no_step_is_taken_back(directory: RunDirectory) -> None:
    shutil.copy(directory.samples, directory.eval_samples)
    directory.metrics.write_text('{"step": 1, "lo')  # which is none
    directory.checkpoints.mkdir()
    (directory.tensorboard / "events").mkdir(parents=True)
    directory.fail(TrainingError("no"))
    directory.remove_unbegun()
    assert not directory.path.exists()
    directory.remove_unbegun()


@pytest.mark.parametrize("begun", ["metrics", "checkpoint"])
def test_one_that_made_a_step_stays(directory: RunDirectory, begun: str) -> None:
    if begun == "metrics":
        directory.note({"step": 1, "loss": 2.0})
    else:
        (directory.checkpoints / "step-000001").mkdir(parents=True)
    before = names(directory.path)
    directory.remove_unbegun()
    assert names(directory.path) == before


def test_what_others_have_put_there_stays(directory: RunDirectory) -> None:
    (directory.path / "notes.md").write_text("mine")
    directory.remove_unbegun()
    assert names(directory.path) == ["notes.md"]


def test_a_new_result_takes_the_place_of_the_old(directory: RunDirectory) -> None:
    path = directory.path / "adapter"
    path.mkdir()
    (path / "old").write_text("")
    before = names(directory.path)
    with suppress(KeyboardInterrupt), directory.new_result("adapter") as place:
        place.mkdir()
        raise KeyboardInterrupt
    assert names(path) == ["old"], "the old one stays until the new one is there"
    with directory.new_result("adapter") as place:
        place.mkdir()
        (place / "new").write_text("")
        assert names(path) == ["old"]
    assert names(path) == ["new"]
    assert names(directory.path) == before
    path.rename(directory.path / ".old-adapter")  # a process was killed here
    with suppress(KeyboardInterrupt), directory.new_result("adapter"):
        raise KeyboardInterrupt
    assert names(path) == ["new"]
    assert names(directory.path) == before


# ── one process at a time ──

HOLD = """
import sys, time
from pathlib import Path
from duoka.tuner.run import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_only_one_process_has_a_run(directory: RunDirectory) -> None:
    command = [sys.executable, "-c", HOLD, str(directory.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            before = (directory.path / "run.json").read_text()
            for use in (lambda: resume(directory), lambda: move(directory, None)):
                with pytest.raises(UsageError, match=rf"in use by process {other.pid} on "):
                    use()
            assert (directory.path / "run.json").read_text() == before
        finally:
            other.kill()
    with directory.locked():
        pass  # the lock of a process that was killed is none


def test_a_lock_alone_is_no_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.locked():
        directory.refuse_used()
    assert not directory.path.exists()


# ── metrics ──


def test_metrics_are_noted_and_forgotten(directory: RunDirectory) -> None:
    assert list(directory.read_metrics()) == []
    entries = [{"step": step, name: step / 3} for step in (1, 2, 3) for name in ("loss", "eval")]
    for entry in entries:
        directory.note(entry)
    assert list(directory.read_metrics()) == entries
    directory.forget_after(2)
    assert list(directory.read_metrics()) == entries[:4]
    directory.forget_after(0)
    assert list(directory.read_metrics()) == []


@pytest.mark.parametrize(
    "line", ['{"step": 2, "loss": 1.', "7", "[1]", '{"step": "2"}', "\udcff\udcfe"]
)
def test_a_line_that_is_none_is_passed_over(directory: RunDirectory, line: str) -> None:
    """As a process leaves one that is killed, or the machine."""
    directory.note({"step": 1, "eval_loss": 2.0})
    with directory.metrics.open("ab") as file:
        file.write(line.encode(errors="surrogateescape"))
    assert list(directory.read_metrics()) == [{"step": 1, "eval_loss": 2.0}]
    directory.forget_after(1)  # begins a new line, before the next one is noted
    directory.note({"step": 2, "eval_loss": 1.0})
    assert [entry["step"] for entry in directory.read_metrics()] == [1, 2]


def test_a_full_disk_is_told(directory: RunDirectory, layout: Layout) -> None:
    directory.note({"step": 1})
    writes: list[Callable[[], object]] = [
        lambda: directory.note({"step": 2, "text": "x" * 2000}),
        lambda: directory.write(SETTINGS, layout.plans, trust_remote_code=False),
        lambda: directory.write_report({"text": "x" * 2000}),
    ]
    before = (directory.path / "run.json").read_text()
    with files_of_at_most(1000):
        for write in writes:
            with pytest.raises(MachineError, match=r"run/[a-z.]+ can't be written: File too large"):
                write()
    assert (directory.path / "run.json").read_text() == before
    assert [entry["step"] for entry in directory.read_metrics()] == [1]
    assert names(directory.path) == ["metrics.jsonl", "run.json", "samples.safetensors"]


def test_a_run_whose_metrics_are_lost_has_its_result(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TuneSettings(seq_length=32, batch=4, epochs=1)
    directory = RunDirectory(tmp_path / "run")
    write_run(directory, settings, make_layout(llama, settings))
    with tuning.one_process(monkeypatch):
        first = resume(directory)
    assert first.report is not None
    directory.metrics.unlink()
    with tuning.one_process(monkeypatch):
        again = resume(directory)
    assert (again.steps, again.result, again.report) == (2, first.result, None)


def test_an_evaluation_that_was_due_is_made_up_for(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between a checkpoint and its evaluation."""
    settings = TuneSettings(
        seq_length=32, batch=4, epochs=2, save_every=1, keep=9, eval_every=2, eval_data=("e",)
    )
    directory = RunDirectory(tmp_path / "run")
    write_run(directory, settings, make_layout(llama, settings))
    shutil.copy(directory.samples, directory.eval_samples)
    with tuning.one_process(monkeypatch):
        whole = resume(directory)
    metrics = list(directory.read_metrics())
    evaluated = {entry["step"]: entry["eval_loss"] for entry in metrics if "eval_loss" in entry}
    assert list(evaluated) == [2, 4]
    assert whole.report is not None
    assert whole.report.eval_loss == evaluated[4]
    assert json.loads((directory.path / "report.json").read_text())["eval_loss"] == evaluated[4]
    for step in (2, 4):
        for later in range(step + 1, 5):
            shutil.rmtree(directory.checkpoints / f"step-{later:06d}", ignore_errors=True)
        made = [e for e in metrics if e["step"] < step or (e["step"] == step and "loss" in e)]
        directory.metrics.write_text("".join(f"{json.dumps(entry)}\n" for entry in made))
        with tuning.one_process(monkeypatch):
            resume(directory)
        again = [(e["step"], e.get("loss"), e.get("eval_loss")) for e in directory.read_metrics()]
        assert again == [(e["step"], e.get("loss"), e.get("eval_loss")) for e in metrics]


# ── failures ──


def test_a_hint_says_what_there_is_to_go_on_from(directory: RunDirectory) -> None:
    assert directory.way_on.startswith("nothing was saved: start again with --resume")
    (directory.checkpoints / ".step-000002.partial").mkdir(parents=True)
    assert directory.way_on.startswith("nothing was saved")
    (directory.checkpoints / "step-000002").mkdir()
    assert directory.way_on == (
        "the last checkpoint is intact: continue from it with --resume, or get its result with "
        f"`duoka tune --export {directory.path}`"
    )


def test_the_first_failure_is_the_reason(directory: RunDirectory) -> None:
    assert directory.failure() is None
    assert directory.fail(TrainingError("the loss is nan", hint="a lower --lr"))
    assert not directory.fail(MachineError("the connection is missing"))
    failure = directory.failure()
    assert type(failure) is DuokaError
    assert (str(failure), failure.hint) == ("the loss is nan", "a lower --lr")
    assert failure.exit_code == TrainingError.exit_code
    directory.forget_failure()
    directory.forget_failure()
    assert directory.failure() is None
    assert directory.fail(MachineError("the disk is full"))
    failure = directory.failure()
    assert failure is not None
    assert (failure.hint, failure.exit_code) == (None, MachineError.exit_code)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"message": "no", "hint": null}'])
def test_a_damaged_failure_is_none(directory: RunDirectory, text: str) -> None:
    (directory.path / ".failure.json").write_text(text)
    assert directory.failure() is None
