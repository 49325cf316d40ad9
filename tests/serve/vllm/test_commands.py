"""What is run, read back by the stand-in's own parser of vLLM's options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from staged import WORKLOAD, renamed, staged
from tiny import Costs, fleet, made_up

from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.serve.vllm import VllmOptions, make_command

PYTHON = Path("/opt/vllm env/bin/python")
OPTIONS = VllmOptions(python=PYTHON)


def options_of(arguments: tuple[str, ...]) -> dict[str, str]:
    start = next(
        place for place, word in enumerate(arguments) if word == "--dtype" or "-pa" in word
    )
    rest = arguments[start:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_the_command_of_a_plan() -> None:
    command = make_command(staged([3, 2]), replace(OPTIONS, host="0.0.0.0", port=8123))
    assert command.arguments[:2] == ("serve", "my model")
    options = options_of(command.arguments)
    assert (options["--host"], options["--port"]) == ("0.0.0.0", "8123")
    assert dict(command.environment) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "VLLM_PP_LAYER_PARTITION": "3,2",
    }


def test_a_persons_options_come_before_the_plans() -> None:
    command = make_command(
        staged([3, 2]), replace(OPTIONS, arguments=("--enforce-eager", "--seed", "1"))
    )
    assert command.words == ("serve", "my model", "--enforce-eager", "--seed", "1")


def test_a_directory_is_named_whole_and_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glm-4-9b").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = replace(staged([3, 2]), source="glm-4-9b")
    command = make_command(plan, OPTIONS)
    assert command.words[1] == str(tmp_path / "glm-4-9b")
    assert options_of(command.arguments)["--served-model-name"] == "glm-4-9b"
    command = make_command(plan, replace(OPTIONS, name="mine"))
    assert options_of(command.arguments)["--served-model-name"] == "mine"


def test_the_checkpoints_code_runs_where_it_is_trusted() -> None:
    trusting = replace(OPTIONS, trust_remote_code=True)
    assert "--trust-remote-code" in make_command(staged([3, 2]), trusting).words
    assert "--trust-remote-code" not in make_command(staged([3, 2]), OPTIONS).words


def test_a_repository_is_served_by_its_name() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    command = make_command(replace(staged([3, 2]), source=f"zai-org/glm-4-9b@{commit}"), OPTIONS)
    assert command.words[1] == "zai-org/glm-4-9b"
    assert options_of(command.arguments)["--served-model-name"] == "zai-org/glm-4-9b"
    assert command.arguments[command.arguments.index("--revision") + 1] == commit


def test_the_profile_gives_the_bytes_of_a_cache_that_isnt_paged() -> None:
    profile = made_up([1 << 20] * 12, Costs(cache=4096))
    workload = Workload(prompt_tokens=1000, new_tokens=24, dtype="bfloat16")
    plan = find_plan(profile, PlanProblem(fleet=fleet(160, 120), workload=workload, use_all=True))
    cuda = {name: name.replace("vgpu", "cuda") for name in plan.fleet.names}
    plan = renamed(replace(plan, source="model"), cuda)
    command = make_command(plan, OPTIONS, profile)
    assert int(options_of(command.arguments)["--kv-cache-memory-bytes"]) > 65 * 16 * 4096
    command = make_command(plan, OPTIONS)
    assert "--kv-cache-memory-bytes" not in command.arguments


def test_weights_that_the_plan_quantizes_are_refused() -> None:
    with pytest.raises(UsageError, match="weights are in int8") as error:
        make_command(replace(staged([3, 2]), workload=replace(WORKLOAD, quantize="int8")), OPTIONS)
    assert error.value.hint


def test_virtual_gpus_are_refused() -> None:
    plan = renamed(staged([3, 2]), {"cuda:0": "vgpu:0", "cuda:1": "vgpu:1"})
    with pytest.raises(UsageError, match=r"virtual GPUs \(vgpu:0, vgpu:1\)"):
        make_command(plan, OPTIONS)


def test_vllms_own_quantization_may_be_asked_for() -> None:
    plan = replace(staged([3, 2]), workload=replace(WORKLOAD, quantize="int8"))
    command = make_command(plan, replace(OPTIONS, arguments=("-q", "bitsandbytes")))
    assert "bitsandbytes" in command.words


@pytest.mark.parametrize(
    "argument", ["--pipeline-parallel-size", "--pipeline_parallel_size=3", "--max-model-len=10"]
)
def test_what_the_plan_decides_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match="can't be passed to vLLM") as error:
        make_command(staged([3, 2]), replace(OPTIONS, arguments=("--enforce-eager", argument, "3")))
    assert error.value.hint


def test_a_key_is_never_shown() -> None:
    assert "sk-abc123" not in repr(replace(OPTIONS, api_key="sk-abc123"))
