"""A checkpoint: whole or not, its hashes, and whether it fits."""

from __future__ import annotations

import hashlib
import shutil
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


def weights_of(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def test_a_whole_one(checkpoint: Path) -> None:
    facts = facts_of(checkpoint)
    (whole,) = model.check_whole(facts)
    assert whole.severity == "ok"
    assert "of safetensors" in whole.text
    (unknown,) = model.check_hashes(facts)
    assert unknown.severity == "skipped"


@pytest.mark.parametrize("of_cache", [False, True])
def test_hashes_that_are_known(checkpoint: Path, tmp_path: Path, of_cache: bool) -> None:
    copied = tmp_path / "models--a--b" / "snapshots" / "0"
    shutil.copytree(checkpoint, copied)
    file = weights_of(copied)
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    place = file
    if of_cache:
        place = copied.parents[1] / "blobs" / digest
        place.parent.mkdir()
        shutil.move(file, place)
        file.symlink_to(place)
    else:
        metadata = copied / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"{'0' * 40}\n{digest}\n1.0\n")
    (right,) = model.check_hashes(opened(copied))
    assert (right.severity, right.text) == ("ok", "the hashes of 1 file match")
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = next(iter(model.check_hashes(opened(copied))))
    assert (damaged.severity, damaged.text) == (
        "error",
        f"{file.name} differs from the published file",
    )


def test_a_config_alone(checkpoint: Path) -> None:
    facts = facts_of(checkpoint / "config.json")
    (alone,) = model.check_whole(facts)
    assert alone.severity == "note"
    assert [*model.check_hashes(facts)] == []


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
