"""``--adapter`` of plan and serve: named adapters are planned, and what can't be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapters import write_adapter

import duoka

from .conftest import GPUS, SIZES, TINY, Program

SERVED = (*GPUS, *SIZES, "--serve", "--sequences", "2")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In published names."""
    rows = TINY["kv_channels"] * (TINY["num_attention_heads"] + 2 * TINY["multi_query_group_num"])
    layer = "transformer.encoder.layers.{}.self_attention.query_key_value"
    sizes = {layer.format(at): (TINY["hidden_size"], rows) for at in range(3)}
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql", sizes)


def test_named_adapters_are_planned(
    tiny: Path, adapter: Path, program: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    names = (f"--adapter=a={adapter}", f"--adapter=b={adapter}")
    done = program("plan", tiny, *SERVED, *names, "--save", saved)
    assert done.returncode == 0, done.stderr
    assert "adapters a, b" in done.stdout
    plan = duoka.Plan.load(saved)
    assert plan.workload.adapters == (("a", str(adapter)), ("b", str(adapter)))
    plain = json.loads(program("plan", tiny, *SERVED, "--json").stdout)["forecast"]
    weights = sum(stage.weight_bytes for stage in plan.forecast.devices)
    added = weights - sum(stage["weight_bytes"] for stage in plain["devices"])
    # 2 adapters of rank 4; each of the three modules has its own copy of A; tensors are rounded up.
    values = 3 * 8 * (3 * TINY["hidden_size"] + TINY["kv_channels"] * 8)
    assert 4 * values <= added <= 4 * values + 18 * 511
    again = program("plan", "--plan", saved, "--replan")
    assert again.returncode == 0, again.stderr
    assert duoka.Plan.load(saved).workload == plan.workload
    vllm = program("plan", tiny, *SERVED, *names, "--export", "vllm")
    assert vllm.returncode == 2
    assert "vLLM can't run this plan: it has adapters that requests choose" in vllm.stderr


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (["plan", *SIZES, "--adapter=a={}"], "choose adapters only over a paged", "--serve"),
        (["plan", "--serve", "--adapter={}"], "isn't NAME=DIR", "--adapter sql=run/adapter"),
        (["plan", "--serve", "--adapter=a={}/no"], "no has no adapter", "adapter_config.json"),
        (["serve", "--adapter={}", "--adapter={}"], "2 adapters without a name", "NAME=DIR"),
        (["serve", "--adapter=tiny={}", "--name=tiny"], "of the model and of an ad", "--name NAME"),
        (["serve", "--offload", "--adapter=a={}"], "choose adapters only over a paged", "--offl"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tiny: Path, adapter: Path, program: Program, options: list[str], message: str, hint: str
) -> None:
    command, *rest = (option.format(adapter) for option in options)
    done = program(command, tiny, *GPUS, *rest)
    assert done.returncode in (2, 4), done.stderr
    text = " ".join(done.stderr.split())
    assert message in text
    assert hint in text.partition("hint:")[2]
    assert "Traceback" not in done.stderr
