"""The ways to run a model: which there are, what is forecast, measured and recommended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_random

from duoka import Checkpoint, Fleet, Workload
from duoka.cli.main import run
from duoka.errors import MachineError
from duoka.planner.request import PlanRequest
from duoka.tools.bench import measure as module
from duoka.tools.bench.deployments import (
    Bench,
    Deployment,
    Rates,
    combine_rates,
    plan_deployments,
    recommend,
)
from duoka.tools.bench.measure import measure
from duoka.tools.demo.checkpoint import CONFIG

TINY = {**CONFIG, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3, "seq_length": 256}
TINY |= {"num_attention_heads": 4, "kv_channels": 16}
SIZES = ["--context", "64", "--sequences", "3"]
WORKLOAD = Workload(batch=3, prompt_tokens=48, new_tokens=16, cache="paged")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("bench") / "tiny", TINY, seed=4)


@pytest.fixture(scope="module")
def bench_on(model: Path) -> Callable[..., Bench]:
    def bench_on(gpus: str, *forms: Any) -> Bench:
        request = PlanRequest(workload=WORKLOAD, gpus=gpus)
        fleet, checkpoint = Fleet.parse(gpus), Checkpoint.open(model)
        return plan_deployments(checkpoint, request, fleet, forms or ("none",))

    return bench_on


def by_name(bench: Bench) -> dict[str, Deployment]:
    return {case.name: case for case in bench.deployments}


# ── which there are ──


def test_one_gpu_each_number_of_them_and_copies(
    bench_on: Callable[..., Bench],
) -> None:
    bench = bench_on("virtual:RTX3090+2xRTX4090")
    cases = by_name(bench)
    assert list(cases) == ["1 GPU", "2 GPUs", "3 GPUs", "3 copies, 1 GPU each"]
    assert [case.num_devices for case in bench.deployments] == [1, 2, 3, 3]
    assert all(case.trouble == "" for case in bench.deployments)
    # The fastest ones; each copy has its part of the requests, and pages for these.
    assert cases["1 GPU"].plans[0].devices == ("vgpu:1",)
    assert {*cases["2 GPUs"].plans[0].devices} == {"vgpu:1", "vgpu:2"}
    assert [plan.workload.batch for plan in cases["3 copies, 1 GPU each"].plans] == [1, 1, 1]
    assert cases["1 GPU"].plans[0].workload.pages == 3 * 64 // 16
    for name in ("1 GPU", "3 GPUs"):
        assert None not in vars_of(cases[name].forecast)
    assert cases["1 GPU"].forecast.idle_share == 0 < cases["3 GPUs"].forecast.idle_share  # type: ignore[operator]


def vars_of(rates: Rates) -> list[float | None]:
    return [getattr(rates, name) for name in Rates.__dataclass_fields__]


def test_a_command_serves_a_model_so(bench_on: Callable[..., Bench], model: Path) -> None:
    commands = {
        name: case.to_dict()["command"]
        for name, case in by_name(bench_on("virtual:RTX3090+2xRTX4090")).items()
    }
    start, sizes = f"duoka serve {model} --gpus virtual:", "--context 64 --new-tokens 16"
    assert commands["2 GPUs"].startswith(f"{start}RTX4090+RTX4090 {sizes} --sequences 3")
    assert commands["3 copies, 1 GPU each"].startswith(f"{start}RTX3090+2xRTX4090 {sizes}")
    assert commands["3 copies, 1 GPU each"].endswith("--replicas 3")
    (case,) = bench_on("virtual:RTX4090").deployments
    (plan,) = case.plans
    assert "--objective throughput" in case.to_dict()["command"]
    rehearsed = replace(plan.fleet.devices[0], measured=("flops_per_second",))
    plan = replace(plan, fleet=Fleet(devices=(rehearsed,)))
    assert "--objective" not in replace(case, plans=(plan,)).to_dict()["command"]


def test_where_the_fastest_is_too_small_the_largest_is_taken(
    bench_on: Callable[..., Bench],
) -> None:
    bench = bench_on("virtual:fast:900MiB,900GB/s,90TFLOPs+slow:2GiB,1GB/s,1TFLOPs")
    assert by_name(bench)["1 GPU"].plans[0].devices == ("vgpu:0",)  # it has room for this one
    small = replace(Fleet.parse("virtual:64MiB,1MiB").devices[1], name="vgpu:0")
    large = replace(Fleet.parse("virtual:64MiB,1MiB").devices[0], name="vgpu:1")
    speeds = {"memory_bytes_per_second": 9e11, "flops_per_second": 9e13}
    fleet = Fleet(devices=(replace(small, **speeds), replace(large, **dict.fromkeys(speeds, 1e9))))
    source = bench.deployments[0].plans[0].source
    request = PlanRequest(workload=WORKLOAD, gpus="virtual:1MiB,64MiB")
    bench = plan_deployments(Checkpoint.open(source), request, fleet, ["none"])
    assert by_name(bench)["1 GPU"].plans[0].devices == ("vgpu:1",)


def test_what_doesnt_fit_says_so_and_the_rest_goes_on(bench_on: Callable[..., Bench]) -> None:
    bench = bench_on("virtual:1MiB")
    assert [case.plans for case in bench.deployments] == [()]
    assert "does not fit" in bench.deployments[0].trouble
    assert recommend(bench) == (None, ())
    assert bench.to_dict()["recommended"] is None


# ── which is best ──


def made_up(bench: Bench, *speeds: tuple[float, float], measured: bool = True) -> Bench:
    """A bench with deployments of these speeds, of one user and of all."""
    cases = []
    for case, (one, many) in zip(bench.deployments, speeds, strict=False):
        rates = Rates(one_tokens_per_second=one, many_tokens_per_second=many)
        name = "measured" if measured else "forecast"
        cases.append(replace(case, **{name: rates}))
    return replace(bench, deployments=(*cases, *bench.deployments[len(cases) :]))


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ([(10, 20), (20, 30), (5, 10)], "2 GPUs"),
        ([(10, 20), (10.2, 20.4), (5, 10)], "1 GPU"),  # nearly as good, with fewer
        ([(10, 20), (9, 30), (5, 10)], "2 GPUs"),
    ],
)
def test_the_best_for_one_and_for_all(
    speeds: list[tuple[float, float]], best: str, bench_on: Callable[..., Bench]
) -> None:
    found, why = recommend(made_up(bench_on("virtual:2x64MiB"), *speeds))
    assert found is not None
    assert found.name == best
    assert len(why) == 3
    assert best in why[2]


def test_what_was_measured_counts_where_anything_was(bench_on: Callable[..., Bench]) -> None:
    forecast = made_up(bench_on("virtual:2x64MiB"), (10, 20), (99, 99), measured=False)
    assert recommend(forecast)[0] == forecast.deployments[1]
    measured = made_up(forecast, (1, 2))
    assert recommend(measured)[0] == measured.deployments[0]


def test_without_speeds_the_fewest_gpus_are_recommended(bench_on: Callable[..., Bench]) -> None:
    best, (why,) = recommend(bench_on("virtual:2x64MiB"))
    assert best is not None
    assert best.name == "1 GPU"
    assert "unknown" in why


def test_copies_answer_together_and_one_user_has_the_fastest() -> None:
    slow = Rates(one_tokens_per_second=1, many_tokens_per_second=10, idle_share=0.5)
    fast = Rates(one_tokens_per_second=2, many_tokens_per_second=20, idle_share=0.1)
    both = combine_rates([slow, fast])
    assert (both.one_tokens_per_second, both.many_tokens_per_second) == (2, 30)
    assert both.idle_share == pytest.approx(0.3)
    assert both.first_token_seconds is None


# ── on the command line ──


def test_gpus_that_arent_here_are_forecast(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(model), "--gpus", "2xRTX4090", *SIZES]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert "declared GPUs that this machine doesn't have; all numbers are forecasts" in err
    assert "2 copies, 1 GPU" in out
    assert "recommended: " in out
    assert run([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["format"], data["requests"]) == ("duoka.bench", 3)
    best = data["deployments"][data["recommended"]]
    assert best["command"] in out.replace("\n", "")
    assert all(case["measured"] is None for case in data["deployments"])


def test_ctrl_c_keeps_what_was_measured(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(case: Deployment, *, trust_remote_code: bool) -> Deployment:
        if case.name == "2 GPUs":
            raise KeyboardInterrupt
        return replace(case, measured=Rates(one_tokens_per_second=7, many_tokens_per_second=9))

    monkeypatch.setattr(module, "measure", stopped)
    command = ["bench", str(model), "--gpus", "virtual:2x64MiB", "--json", *SIZES]
    assert run(command) == 128 + signal.SIGINT
    cases = json.loads(capsys.readouterr().out)["deployments"]
    assert [case["measured"] is not None for case in cases] == [True, False, False]


def test_where_all_fail_the_table_and_the_exit_code_say_so(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(case: Deployment, *, trust_remote_code: bool) -> Deployment:
        return replace(case, trouble="it has burnt")

    monkeypatch.setattr(module, "measure", failing)
    assert run(["bench", str(model), "--gpus", "virtual:64MiB", *SIZES]) == 7
    out, err = capsys.readouterr()
    assert "it has burnt" in out
    assert "fits none of these deployments" in err


# ── measured ──


def test_a_copy_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.01)
    ours, theirs = Pipe()
    with ours, theirs, pytest.raises(MachineError, match=r"no response within 0\.01 s"):
        module._exchange([ours], [None])


@pytest.mark.slow
@pytest.mark.process
def test_a_split_and_copies_run_and_take_the_memory_of_its_forecast(
    bench_on: Callable[..., Bench],
) -> None:
    for case in map(measure, bench_on("virtual:2x64MiB").deployments[1:]):
        assert case.trouble == ""
        assert case.measured is not None
        assert None not in vars_of(case.measured)
        for gpu in case.memory():
            assert gpu["measured_bytes"] == gpu["forecast_bytes"]


@pytest.mark.process
def test_a_process_that_is_killed_ends_its_deployment_alone(
    bench_on: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(module.WorkerGroup):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            os.kill(self._processes[0].pid, signal.SIGKILL)

    monkeypatch.setattr(module, "WorkerGroup", Killed)
    case = measure(bench_on("virtual:64MiB").deployments[0])
    assert case.measured is None
    assert case.trouble == "its process has ended: signal 9"
