"""A checkpoint: whole or not, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_random

import duoka
from duoka.errors import InfeasibleError, WayOut
from duoka.tools.demo.checkpoint import CONFIG
from duoka.tools.doctor import model
from duoka.tools.doctor.facts import Facts
from duoka.tools.doctor.model import ModelFacts

TINY = {**CONFIG, "hidden_size": 64, "padded_vocab_size": 1536, "ffn_hidden_size": 96}
TINY |= {"num_layers": 3, "num_attention_heads": 4, "kv_channels": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("doctored"), TINY, seed=3)


def facts_of(directory: Path) -> ModelFacts:
    return ModelFacts(str(directory), lambda: pytest.fail("nobody asks for a plan"))


def opened(directory: Path) -> ModelFacts:
    facts = facts_of(directory)
    list(model.check_whole(facts))
    return facts


def test_a_whole_one(checkpoint: Path) -> None:
    facts = facts_of(checkpoint)
    (whole,) = model.check_whole(facts)
    assert whole.severity == "ok"
    assert "of safetensors" in whole.text


def test_a_config_alone(checkpoint: Path) -> None:
    facts = facts_of(checkpoint / "config.json")
    (alone,) = model.check_whole(facts)
    assert alone.severity == "note"


def test_whether_it_fits(checkpoint: Path) -> None:
    way = WayOut(
        kind="int8",
        text="weights in 8 bit",
        options=("--quantize", "int8"),
        context_tokens=96,
        batch=1,
        num_gpus=1,
        free_bytes=5,
    )

    def refuse() -> duoka.Plan:
        raise InfeasibleError("the model does not fit", ways_out=[way])

    machine = Facts("virtual:1MiB", Path("/"))
    facts = opened(checkpoint)
    facts.make_plan = refuse
    (tight,) = model.check_fit(facts, machine)
    assert (tight.severity, tight.text) == ("error", "the model does not fit")
    assert tight.advice == (
        f"weights in 8 bit: duoka plan {checkpoint} --gpus virtual:1MiB --quantize int8"
    )
    assert [*model.check_fit(facts_of(checkpoint), machine)] == []  # it couldn't be opened
    (nowhere,) = model.check_fit(facts, Facts(None, Path("/")))
    assert nowhere.severity == "skipped"
