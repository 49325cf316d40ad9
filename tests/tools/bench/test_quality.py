"""Perplexity in windows, held against the plain way to compute it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from checkpoints import write_random
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import duoka
from duoka import Checkpoint, Fleet, Workload
from duoka.cli.main import run
from duoka.errors import UsageError
from duoka.forecast.workload import Quantization
from duoka.models.text.tokenizer import load_tokenizer
from duoka.tools.bench.quality import Quality, Score, Windows, measure_quality, windows_for
from duoka.tools.demo.checkpoint import CONFIG

pytestmark = pytest.mark.usefixtures("single_sequences")

TEXT = "What is a GPU? Two of them fit what one does not. " * 4
TINY = {**CONFIG, "hidden_size": 128, "ffn_hidden_size": 192, "num_layers": 2, "seq_length": 256}
TINY |= {"num_attention_heads": 4, "kv_channels": 32}
FLEET = Fleet.parse("virtual:64MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("tiny"), TINY, seed=4)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@given(context=st.integers(2, 40), num_tokens=st.integers(1, 200))
def test_every_token_is_scored_once(context: int, num_tokens: int) -> None:
    windows = list(Windows(context_tokens=context).cut(num_tokens))
    scored = [token for _, first, stop in windows for token in range(first, stop)]
    assert scored == list(range(num_tokens))
    assert all(start <= first < stop <= start + context for start, first, stop in windows)
    # At least the overlap is before whatever is scored, but in the first window.
    assert all(first - start >= context - context // 2 for start, first, _ in windows[1:])


@pytest.mark.slow
def test_perplexity_is_that_of_the_whole_text(model: Path, text: Path) -> None:
    checkpoint = Checkpoint.open(model)
    whole = Windows(context_tokens=250)
    found = measure_quality(checkpoint, text, FLEET, forms=("int8",), windows=whole)
    tokenizer = load_tokenizer(model, checkpoint.config)
    prefix = len(tokenizer.encode(""))
    ids = torch.tensor([tokenizer.encode(TEXT)])
    assert ids.shape[1] < 250
    loaded = duoka.load(
        duoka.plan(checkpoint, "virtual:64MiB", Workload(prompt_tokens=200, new_tokens=8))
    )
    with torch.no_grad():
        logits = loaded(ids.to("vgpu:0")).logits[0].cpu()
    loss = F.cross_entropy(logits[prefix - 1 : -1].float(), ids[0, prefix:])
    assert found.scored_tokens == ids.shape[1] - prefix
    assert found.scores[0].perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert found.scores[1].weights == "int8"
    assert found.scores[1].perplexity == pytest.approx(found.scores[0].perplexity, rel=0.01)
    assert found.scores[1].weight_bytes < found.scores[0].weight_bytes


def test_windows_are_no_longer_than_the_model(model: Path) -> None:
    assert windows_for(Checkpoint.open(model)) == Windows(context_tokens=256)


def test_the_program_prints_a_table_and_json(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measured(checkpoint: Checkpoint, file: Path, fleet: Fleet, **options: Any) -> Quality:
        asked.update(options)
        scores = (
            Score(weights="float32", weight_bytes=2000, perplexity=4.0),
            Score(weights="nf4", weight_bytes=500, perplexity=5.0),
        )
        windows = options["windows"]
        return Quality(model="m", file="f", scored_tokens=9, windows=windows, scores=scores)

    monkeypatch.setattr("duoka.tools.bench.quality.measure_quality", measured)
    words = ("bench", "--quality", str(text), str(model), "--gpus", "virtual:64MiB")
    words = (*words, "--quantize", "nf4", "--context", "64")
    assert run(words) == 0
    table = capsys.readouterr().out
    assert (asked["forms"], asked["windows"].context_tokens) == (["nf4"], 64)
    assert "9 tokens of f, in windows of 64 every 32" in table
    assert "+25.00%" in table
    assert run((*words, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [score["weights"] for score in told["scores"]] == ["float32", "nf4"]
    assert told["windows"]["context_tokens"] == 64


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "at least 16"), (b"too short", "at least 16"), (b"\xff\xfe\x00" * 99, "can't be read")],
)
def test_texts_that_are_none_are_refused(
    model: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        measure_quality(Checkpoint.open(model), file, FLEET)
    with pytest.raises(UsageError, match="can't be read"):
        measure_quality(Checkpoint.open(model), tmp_path, FLEET)


@pytest.mark.slow
def test_quantized_experts_are_measured(tmp_path: Path, text: Path) -> None:
    checkpoint = Checkpoint.open(tuning.write_model("wide experts", tmp_path / "model"))
    windows = Windows(context_tokens=64)
    forms: tuple[Quantization, ...] = ("int8", "int4", "nf4")
    quality = measure_quality(checkpoint, text, FLEET, forms=forms, windows=windows)
    plain, *scores = quality.scores
    assert [score.weights for score in scores] == list(forms)
    for score in scores:
        assert score.perplexity == pytest.approx(plain.perplexity, rel=0.3)
        assert score.weight_bytes < 0.75 * plain.weight_bytes
    assert scores[0].perplexity == pytest.approx(plain.perplexity, rel=0.02)
