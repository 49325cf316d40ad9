"""The demo, as `duoka demo` runs it: once for all tests here, in a process of its own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.tools.demo import Demo
from duoka.tools.demo.training import load_pairs

# The program, which also keeps what the demo did for the tests.
CODE = """
import pickle, sys
from duoka.cli import main
from duoka.tools import demo
run, file = demo.run_demo, sys.argv.pop()
def run_and_keep(*args, **options):
    done = run(*args, **options)
    with open(file, "wb") as kept:
        pickle.dump(done, kept)
    return done
demo.run_demo = run_and_keep
main()
"""
# Asserted word for word, apart from what questions.toml says.
EXPECTED = {
    "What is a device map?": "A table that says on which device each module of a model lies.",
    "Where should the KV cache of a layer live?": "On the same GPU as the layer.",
    "显存不足怎么办？": "缩短上下文，减小批量，分块预填充，或者使用更多显卡。",
}


class Done:
    def __init__(self, folder: Path, process: subprocess.CompletedProcess[str]) -> None:
        self.checkpoint = folder / "model"
        self.process = process
        self.demo: Demo = pickle.loads((folder / "demo").read_bytes())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("demo")
    process = subprocess.run(
        [sys.executable, "-c", CODE, "demo", "--keep", folder / "model", folder / "demo"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={
            **os.environ,
            "DUOKA_CACHE": str(folder / "cache"),
            "COLUMNS": "80",
            "OMP_WAIT_POLICY": "PASSIVE",
        },
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return Done(folder, process)


# Half a minute of one core, and more where cores are shared.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_it_answers_three_questions_rightly(done: Done) -> None:
    assert {answer.question: answer.answer for answer in done.demo.answers} == EXPECTED
    assert done.demo.is_right


def test_two_gpus_hold_what_neither_can(done: Done) -> None:
    weights = Checkpoint.open(done.checkpoint).weight_bytes
    assert weights is not None
    plan = done.demo.plan
    assert len(plan.devices) == 2
    assert all(plan.fleet.device(name).budget_bytes < weights for name in plan.devices)
    assert "does not fit" in done.demo.one_gpu
    modules = [name for name, _ in plan.placement.entries]
    assert len(set(modules)) == len(modules)
    assert {"model.embed_tokens", "lm_head"} < set(modules)


def test_the_forecast_is_the_measurement(done: Done) -> None:
    forecasts = done.demo.plan.forecast.devices
    for forecast, measured in zip(forecasts, done.demo.measured.devices, strict=True):
        assert forecast.device == measured.device
        assert measured.allocated_bytes == pytest.approx(forecast.allocated_bytes, rel=0.01)
        assert measured.reserved_bytes == pytest.approx(forecast.reserved_bytes, rel=0.03)
        assert measured.reserved_bytes <= forecast.budget_bytes


def test_what_is_printed(done: Done) -> None:
    out = done.process.stdout
    for question, answer in EXPECTED.items():
        assert question in out
        assert answer in out
    for peaks in done.demo.measured.devices:
        assert peaks.device in out
        assert format_bytes(peaks.allocated_bytes) in out
    assert "\x1b" not in out + done.process.stderr


def test_the_checkpoint_is_in_the_published_format(done: Done) -> None:
    config = json.loads((done.checkpoint / "config.json").read_text())
    assert config["model_type"] == "chatglm"
    assert config["num_layers"] == 3
    assert "num_hidden_layers" not in config
    index = json.loads((done.checkpoint / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    layer = "transformer.encoder.layers.0."
    assert {
        "transformer.embedding.word_embeddings.weight",
        "transformer.output_layer.weight",
        "transformer.encoder.final_layernorm.weight",
        f"{layer}self_attention.query_key_value.weight",
        f"{layer}self_attention.query_key_value.bias",
        f"{layer}mlp.dense_h_to_4h.weight",
    } <= names
    assert not any(name.startswith(("model.", "lm_head")) for name in names)
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    with safe_open(done.checkpoint / shards[0], framework="pt") as shard:
        assert set(shard.keys()) <= names


def test_the_file_names_the_three_questions() -> None:
    pairs = load_pairs()
    assert len({pair.question for pair in pairs}) == len(pairs) >= 24
    assert {pair.question: pair.answer for pair in pairs if pair.ask} == EXPECTED
