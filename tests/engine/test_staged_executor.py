"""The engine with a process for each GPU: the same answers, and what others see of a failure."""

from __future__ import annotations

import errno
import gc
import json
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_generate
import published
import pytest
import tuning
from faulty_worker import HANG, HARMFUL, LOSE, MEMORY, RAISE
from peft import LoraConfig, get_peft_model
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import duoka
from duoka.engine import Completion, Engine, Grammar, SamplingParams, staged_executor
from duoka.engine.staged_executor import WorkerError
from duoka.errors import GpuLostError, MachineError, UsageError
from duoka.report import live
from duoka.workers import group, supervision
from duoka.workers.process import WorkerProcess

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("quick_workers")]

WORK = duoka.Workload(
    batch=4, prompt_tokens=64, new_tokens=16, dtype="float32", prefill_chunk_tokens=16
)
CAREFUL = SamplingParams(logit_bias=dict.fromkeys(HARMFUL, -100))


def make_plan(family: str, directory: Path, number: int, **work: Any) -> Any:
    path = tuning.write_model(family, directory / family)
    return duoka.plan(path, f"virtual:{number}x256MiB", replace(WORK, **work), use_all=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_plan("shallow", tmp_path_factory.mktemp("model"), 2)


@pytest.fixture(scope="module")
def staged(plan: Any) -> Iterator[Engine]:
    with Engine(plan, processes=True) as engine:
        yield engine


def prompts(number: int) -> list[list[int]]:
    """Without the tokens that do harm where they are meant to."""
    rng = random.Random(1)
    tokens = [token for token in range(256) if token not in HARMFUL]
    return [[rng.choice(tokens) for _ in range(rng.randrange(1, 64))] for _ in range(number)]


def ids(completion: Completion | BaseException) -> list[int]:
    assert isinstance(completion, Completion), completion
    return [choice.token for choice in completion.tokens]


def open_files() -> list[str]:
    gc.collect()  # what earlier tests left in cycles may hold files
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def alike(one: Any, other: Any, *, within: float = 1e-4) -> None:
    """All answers of two engines are the same, and log-probabilities within a distance."""
    texts = prompts(5)
    drawn = SamplingParams(temperature=1.0, seed=3, logprobs=2)
    grammar = Grammar.regex("[a-f ]{5,}!")
    for params in (SamplingParams(), drawn, replace(drawn, grammar=grammar)):
        expected = one.generate(texts, params)
        found = other.generate(texts, params)
        assert [ids(completion) for completion in found] == [ids(c) for c in expected]
        for completion, reference in zip(found, expected, strict=True):
            logprobs = [choice.logprob for choice in reference.tokens]
            assert [c.logprob for c in completion.tokens] == pytest.approx(logprobs, abs=within)


def test_processes_answer_as_one_does(plan: Any, staged: Engine) -> None:
    with Engine(plan, processes=False) as inline:
        alike(inline, staged)
    assert staged.load().free_pages == staged.capacity.pages
    busy = staged._executor.busy_seconds()  # type: ignore[attr-defined]
    assert set(busy) == set(plan.devices)
    assert all(seconds > 0 for seconds in busy.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "number", "work"),
    [
        ("tied", 2, {}),
        ("llama", 2, {"cache": "paged-int8"}),
        ("experts", 3, {"quantize": "nf4"}),
        ("wide experts", 2, {"quantize": "nf4"}),
    ],
)
def test_more_processes_and_stages_answer_as_one_does(
    family: str, number: int, work: dict[str, Any], tmp_path: Path
) -> None:
    plan = make_plan(family, tmp_path, number, **work)
    with (
        Engine(plan, processes=False, warm_up="largest") as inline,
        Engine(plan, processes=True, warm_up="largest") as staged,
    ):
        # In 8 bit a key at the edge of two integers may be rounded to either, by its company.
        alike(inline, staged, within=1e-3 if "cache" in work else 1e-4)


@pytest.mark.slow
def test_processes_with_experts_in_int4_answer_as_one_does(tmp_path: Path) -> None:
    """One request at a time: tensor cores round to 16 bit, by the company of a token."""
    answers_alone_are_equal(make_plan("wide experts", tmp_path, 2, quantize="int4"), 4)


def answers_alone_are_equal(plan: duoka.Plan, number: int) -> None:
    with (
        Engine(plan, processes=False, warm_up="first") as inline,
        Engine(plan, processes=True, warm_up="first") as staged,
    ):
        for text in prompts(number):
            (expected,), (answer,) = inline.generate([text]), staged.generate([text])
            assert ids(answer) == ids(expected)


@pytest.mark.slow
def test_processes_read_their_parts_of_a_published_checkpoint(tmp_path: Path) -> None:
    path = published.write(tmp_path, "gptq experts")
    tuning.make_tokenizer().save_pretrained(path)
    plan = duoka.plan(path, "virtual:2x256MiB", replace(WORK, dtype="auto"), use_all=True)
    answers_alone_are_equal(plan, 2)


def test_what_a_process_does_not_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: Engine
) -> None:
    assert staged.fallbacks() == []
    monkeypatch.setenv("DUOKA_ATTENTION", "gather")
    work = {"cache": "paged", "dtype": "bfloat16", "page_tokens": 256, "cuda_graphs": False}
    plan = make_plan("shallow", tmp_path, 2, pages=4, **work)
    with Engine(plan, processes=True, warm_up="first") as engine:
        engine.generate(prompts(1))
        assert engine.fallbacks() == [
            (device, "attention", "DUOKA_ATTENTION=gather") for device in ("vgpu:0", "vgpu:1")
        ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's
def test_an_adapter_is_added_in_each_process(plan: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plan.source)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(tmp_path)
    with (
        Engine(plan, processes=False, adapter=tmp_path) as inline,
        Engine(plan, processes=True, adapter=tmp_path) as staged,
    ):
        alike(inline, staged)


def test_a_generation_config_holds_in_every_process(tmp_path: Path) -> None:
    path = tuning.write_model("shallow", tmp_path / "model")
    rules = {
        "suppress_tokens": [*range(60, 250)],
        "bad_words_ids": [[5], [7, 8]],
        "min_new_tokens": 7,
    }
    config = {"eos_token_id": 256, "forced_eos_token_id": 256, "no_repeat_ngram_size": 2, **rules}
    (path / "generation_config.json").write_text(json.dumps(config))
    plan, texts = duoka.plan(path, "virtual:2x256MiB", WORK, use_all=True), prompts(6)
    expected = plain_generate.answers(plan, texts)
    with Engine(plan, processes=True) as engine:
        answers = engine.generate(texts, SamplingParams(max_new_tokens=WORK.new_tokens))
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [answer.finish for answer in answers] == [answer.finish for answer in expected]
    assert {answer.finish for answer in expected} == {"stop"}


def test_who_cancels_frees_pages(staged: Engine) -> None:
    streams = [staged.submit(text) for text in prompts(9)]
    for stream in streams[:4]:
        stream.cancel()
    assert all(stream.result().finish != "cancelled" for stream in streams[4:])
    assert [stream.result().finish for stream in streams[:4]].count("cancelled") > 0
    assert staged.load().free_pages == staged.capacity.pages


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_engine(plan: Any, rank: int) -> None:
    failures: list[Exception] = []
    with Engine(plan, processes=True, on_failure=failures.append) as engine:
        executor: Any = engine._executor
        streams = [engine.submit(text, SamplingParams(max_new_tokens=16)) for text in prompts(12)]
        next(iter(streams[0]))
        os.kill(executor._workers._processes[rank].pid, signal.SIGKILL)
        for stream in streams[-4:]:  # others may have been answered before
            with pytest.raises(WorkerError, match=f"of vgpu:{rank} has ended: signal 9"):
                stream.result()
        with pytest.raises(WorkerError, match="signal 9"):
            engine.submit([1, 2])
        assert executor._workers.exit_codes(0).keys() == {0, 1}
    assert [type(failure) for failure in failures] == [WorkerError]


@pytest.mark.slow
def test_a_process_that_is_stopped_while_nobody_asks_ends_the_engine(
    plan: Any, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)  # what stands in for it can't be stopped
    monkeypatch.setattr(supervision, "SILENT_SECONDS", 2.0)
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    with Engine(plan, processes=True, on_failure=failures.put) as engine:
        executor: Any = engine._executor
        with pytest.raises(queue.Empty):  # it is looked at, and shows signs of life
            failures.get(timeout=2.5)
        os.kill(executor._workers._processes[1].pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="vgpu:1 hasn't responded for 2 s"):
            raise failures.get(timeout=30)
        assert executor._workers.exit_codes(10).keys() == {0, 1}


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_loads_is_told(
    plan: Any, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)  # what stands in for it can't be stopped
    monkeypatch.setattr(supervision, "SILENT_SECONDS", 4.0)
    monkeypatch.setattr(staged_executor, "_MODULE", "faulty_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("STOPPED_IN_LOAD", "1")
    before = open_files()
    with pytest.raises(WorkerError, match="vgpu:1 hasn't responded for 4 s"):
        Engine(plan, processes=True)
    assert open_files() == before


@pytest.mark.slow
def test_a_process_that_is_stopped_does_not_outlive_its_parent(python: str) -> None:
    program = (
        "import time\n"
        "from duoka.workers.group import WorkerGroup\n"
        "workers = WorkerGroup('timeit', 1, ('-n1', '-sinput()'))\n"  # it reads standard input
        "print(workers._processes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [python, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGSTOP)
        status = Path(f"/proc/{worker}/status")
        while "T (stopped)" not in status.read_text():  # the kernel continues stopped groups alone
            time.sleep(0.01)
        parent.kill()
    end = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < end, "it is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_each_process_says_what_it_has(
    plan: Any, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `duoka top`: weights and pages as they were forecast, and that it has worked."""
    monkeypatch.setattr(live, "_ROOT", Path("/tmp"))  # those of other processes
    monkeypatch.setattr(sys, "executable", python)  # forks have other numbers than are known here
    with Engine(plan, processes=True, warm_up="largest") as engine:
        executor: Any = engine._executor
        pids = [process.pid for process in executor._workers._processes]
        end = time.monotonic() + 60
        while True:
            engine.generate(prompts(4))
            devices = [device for device in live.read_memory() if device.pid in pids]
            busy = [d for d in devices if d.busy_share and d.measured.kv_cache_bytes]
            if len(busy) == 2:
                break
            assert time.monotonic() < end, devices
    devices.sort(key=lambda device: pids.index(device.pid))
    assert [device.measured.device for device in devices] == list(plan.devices)
    for device, stage in zip(devices, plan.forecast.devices, strict=True):
        assert device.forecast == stage
        assert device.measured.weight_bytes == stage.weight_bytes
        assert device.measured.reserved_bytes <= stage.reserved_bytes


def test_nothing_is_left_where_a_process_cannot_be_started(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerProcess] = []

    def start_one(*arguments: Any, **options: Any) -> WorkerProcess:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(WorkerProcess(*arguments, **options))
        return started[0]

    monkeypatch.setattr(group, "WorkerProcess", start_one)
    before = open_files()
    with pytest.raises(MachineError, match="vgpu:0, vgpu:1 can't be started: Resource temp"):
        Engine(plan, processes=True)
    assert started[0].exit_code == -signal.SIGKILL
    assert open_files() == before


def test_nothing_is_left_where_a_process_cannot_load_its_part(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.engine.staged_executor._MODULE", "keyword")  # it does nothing
    before = open_files()
    with pytest.raises(WorkerError, match="has ended: exit code 0"):
        Engine(plan, processes=True)
    assert open_files() == before


def test_one_gpu_has_no_processes(plan: Any, tmp_path: Path) -> None:
    path = tuning.write_model("shallow", tmp_path / "model")
    alone = duoka.plan(path, "virtual:256MiB", WORK)
    with pytest.raises(UsageError, match="the plan uses one GPU"):
        Engine(alone, processes=True)


# ── failures inside a process ──


@pytest.fixture(scope="module")
def faults(plan: Any) -> Iterator[Any]:
    """The plan, in whose processes tokens do harm: see faulty_worker.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        patch.setattr(staged_executor, "_MODULE", "faulty_worker")
        patch.setattr(staged_executor, "_UNKNOWN_SECONDS", 5.0)
        yield plan


@pytest.fixture(scope="module")
def faulty(faults: Any) -> Iterator[Engine]:
    with Engine(faults) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_fails_ends_alone(faulty: Engine, staged: Engine, rank: int) -> None:
    texts = prompts(6)
    expected = [ids(completion) for completion in staged.generate(texts, CAREFUL)]
    bad = faulty.submit([1, RAISE[rank], 2], CAREFUL)
    streams = [faulty.submit(text, CAREFUL) for text in texts]
    with pytest.raises(RuntimeError, match="a kernel failed"):
        bad.result()
    assert [ids(stream.result()) for stream in streams] == expected
    assert faulty.load().free_pages == faulty.capacity.pages


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_is_short_is_enough_for_smaller_steps(
    faulty: Engine, staged: Engine, rank: int
) -> None:
    texts = [[*text, MEMORY[rank], *text[:9]] for text in prompts(5)]
    texts = [text[-60:] for text in texts]
    expected = [ids(completion) for completion in staged.generate(texts, CAREFUL)]
    assert [ids(completion) for completion in faulty.generate(texts, CAREFUL)] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "kind", "said"),
    [
        (HANG, WorkerError, "a step hasn't finished within 5 seconds"),
        (LOSE[0], GpuLostError, "vgpu:0 has failed: CUDA error: unspecified launch failure\n"),
        (LOSE[1], GpuLostError, "vgpu:1 has failed: CUDA error: unspecified launch failure\n"),
    ],
)
def test_what_is_lost_ends_all_requests(faults: Any, token: int, kind: Any, said: str) -> None:
    with Engine(faults, warm_up="largest") as engine:
        streams = [engine.submit(text, CAREFUL) for text in ([1, 2], [1, token], [3, 4])]
        for stream in streams[1:]:
            with pytest.raises(kind, match=said):
                stream.result()
        with pytest.raises(kind, match=said):
            engine.submit([1, 2])
        codes = engine._executor._workers.exit_codes(0)  # type: ignore[attr-defined]
    if kind is GpuLostError:
        assert codes[LOSE.index(token)] == GpuLostError.exit_code
