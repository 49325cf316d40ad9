"""What is run on each machine, read back by the stand-in's own parser of vLLM's options."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from staged import WORKLOAD, renamed, staged
from tiny import Costs, fleet, made_up

from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.serve.vllm import VllmOptions, commands, parse_nodes

PYTHON = Path("/opt/vllm env/bin/python")
OPTIONS = VllmOptions(python=PYTHON)


def options_of(arguments: tuple[str, ...]) -> dict[str, str]:
    start = next(
        place for place, word in enumerate(arguments) if word == "--dtype" or "-pa" in word
    )
    rest = arguments[start:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_one_machine_has_one_command() -> None:
    (command,) = commands(staged([3, 2]), replace(OPTIONS, host="0.0.0.0", port=8123))
    assert command.arguments[:2] == ("serve", "my model")
    options = options_of(command.arguments)
    assert (options["--host"], options["--port"]) == ("0.0.0.0", "8123")
    assert "--nnodes" not in options
    assert dict(command.environment) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "VLLM_PP_LAYER_PARTITION": "3,2",
    }


def test_one_machine_that_is_named_is_this_one() -> None:
    nodes = parse_nodes("10.0.0.1=4")
    assert commands(staged([3, 2]), replace(OPTIONS, nodes=nodes)) == commands(
        staged([3, 2]), OPTIONS
    )


def test_several_machines_differ_in_rank_and_gpus_alone() -> None:
    nodes = parse_nodes("10.0.0.1=2,10.0.0.2=2")
    head, second = commands(staged([4, 3, 2, 1]), replace(OPTIONS, nodes=nodes))
    first, other = options_of(head.arguments), options_of(second.arguments)
    assert (head.address, second.address) == ("10.0.0.1", "10.0.0.2")
    assert (first["--node-rank"], other["--node-rank"]) == ("0", "1")
    for name in ("--host", "--port", "--served-model-name", "--shutdown-timeout"):
        assert first.pop(name)
        assert name not in other
    assert first | {"--node-rank": ""} == other | {"--node-rank": ""}
    assert (other["--master-addr"], other["--master-port"]) == ("10.0.0.1", "29501")
    assert "--headless" in second.words
    assert "--headless" not in head.words
    assert head.environment == second.environment  # numbers are those of each machine
    assert dict(second.environment)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert dict(second.environment)["VLLM_PP_LAYER_PARTITION"] == "4,3,2,1"


def test_a_command_for_a_shell_has_the_same_words() -> None:
    nodes = parse_nodes("a=1,b=1")
    _, second = commands(staged([3, 2]), replace(OPTIONS, nodes=nodes))
    words = shlex.split(second.shell_text(PYTHON).replace("\\\n", " "))
    environment = [f"{name}={value}" for name, value in second.environment]
    python = [str(PYTHON), "-P", "-m", "vllm.entrypoints.cli.main"]
    assert words == [*environment, *python, *second.arguments]


def test_a_persons_options_come_before_the_plans() -> None:
    (command,) = commands(
        staged([3, 2]), replace(OPTIONS, arguments=("--enforce-eager", "--seed", "1"))
    )
    assert command.words == ("serve", "my model", "--enforce-eager", "--seed", "1")


def test_a_directory_is_named_whole_and_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glm-4-9b").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = replace(staged([3, 2]), source="glm-4-9b")
    (command,) = commands(plan, OPTIONS)
    assert command.words[1] == str(tmp_path / "glm-4-9b")
    assert options_of(command.arguments)["--served-model-name"] == "glm-4-9b"
    (command,) = commands(plan, replace(OPTIONS, name="mine"))
    assert options_of(command.arguments)["--served-model-name"] == "mine"


def test_the_checkpoints_code_runs_where_it_is_trusted() -> None:
    nodes = parse_nodes("a=1,b=1")
    for command in commands(staged([3, 2]), replace(OPTIONS, nodes=nodes, trust_remote_code=True)):
        assert "--trust-remote-code" in command.words
    assert "--trust-remote-code" not in commands(staged([3, 2]), OPTIONS)[0].words


def test_a_repository_is_served_by_its_name() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    (command,) = commands(replace(staged([3, 2]), source=f"zai-org/glm-4-9b@{commit}"), OPTIONS)
    assert command.words[1] == "zai-org/glm-4-9b"
    assert options_of(command.arguments)["--served-model-name"] == "zai-org/glm-4-9b"
    assert command.arguments[command.arguments.index("--revision") + 1] == commit


def test_the_profile_gives_the_bytes_of_a_cache_that_isnt_paged() -> None:
    profile = made_up([1 << 20] * 12, Costs(cache=4096))
    workload = Workload(prompt_tokens=1000, new_tokens=24, dtype="bfloat16")
    plan = find_plan(profile, PlanProblem(fleet=fleet(160, 120), workload=workload, use_all=True))
    cuda = {name: name.replace("vgpu", "cuda") for name in plan.fleet.names}
    plan = renamed(replace(plan, source="model"), cuda)
    (command,) = commands(plan, OPTIONS, profile)
    assert int(options_of(command.arguments)["--kv-cache-memory-bytes"]) > 65 * 16 * 4096
    (command,) = commands(plan, OPTIONS)
    assert "--kv-cache-memory-bytes" not in command.arguments


def test_weights_that_the_plan_quantizes_are_refused() -> None:
    with pytest.raises(UsageError, match="weights are in int8") as error:
        commands(replace(staged([3, 2]), workload=replace(WORKLOAD, quantize="int8")), OPTIONS)
    assert error.value.hint


def test_virtual_gpus_are_refused() -> None:
    plan = renamed(staged([3, 2]), {"cuda:0": "vgpu:0", "cuda:1": "vgpu:1"})
    with pytest.raises(UsageError, match=r"virtual GPUs \(vgpu:0, vgpu:1\)"):
        commands(plan, OPTIONS)


def test_vllms_own_quantization_may_be_asked_for() -> None:
    plan = replace(staged([3, 2]), workload=replace(WORKLOAD, quantize="int8"))
    (command,) = commands(plan, replace(OPTIONS, arguments=("-q", "bitsandbytes")))
    assert "bitsandbytes" in command.words


@pytest.mark.parametrize(
    "argument", ["--pipeline-parallel-size", "--pipeline_parallel_size=3", "--max-model-len=10"]
)
def test_what_the_plan_decides_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match="can't be passed to vLLM") as error:
        commands(staged([3, 2]), replace(OPTIONS, arguments=("--enforce-eager", argument, "3")))
    assert error.value.hint


def test_a_key_is_never_shown() -> None:
    assert "sk-abc123" not in repr(replace(OPTIONS, api_key="sk-abc123"))
