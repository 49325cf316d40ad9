"""Tokenizers that exist only as code for transformers 4: that of `heron`."""

from __future__ import annotations

import json
from pathlib import Path

import plain_generate
import pytest
import tiktoken

import duoka
from duoka import Checkpoint, Workload
from duoka.errors import CheckpointError, ModelError
from duoka.models.transformers4.tokenizer import LegacyTokenizer
from duoka.runtime.prompt_reader import PromptReader

from .conftest import MakeHeron

WORK = Workload(prompt_tokens=24, new_tokens=8, dtype="float32")
SAID = {"tokenizer_class": "HeronTokenizer", "pad_token": "<none>"}


@pytest.fixture
def spoken(heron: MakeHeron) -> Path:
    """The directory of `heron` with its tokenizer."""
    directory = heron().path
    auto_map = {"AutoTokenizer": ["tokenization_heron.HeronTokenizer", None]}
    (directory / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, **SAID}))
    letters = ["<none>", "<begin>", "<end>", "_", *map(chr, range(ord("a"), ord("z") + 1))]
    (directory / "heron.letters").write_text("\n".join(letters))
    return directory


def test_its_code_reads_and_writes(spoken: Path) -> None:
    tokenizer = duoka.tokenizer(spoken, trust_remote_code=True)
    assert tokenizer.encode("a b<end>") == [1, 4, 3, 5, 2]
    assert tokenizer.encode("<", split_special_tokens=True) == [1, 0]
    assert tokenizer.decode([4, 3, 5, 2], skip_special_tokens=True) == "a b"
    assert tokenizer.decode([4, 95]) == "a", "an embedding may have more rows"
    assert tokenizer.eos_token_id == 2
    padded = tokenizer(["a", "a b"], padding=True)
    assert padded["input_ids"] == [[0, 0, 1, 4], [1, 4, 3, 5]]
    assert tokenizer.build_chat_input("ab")["input_ids"].tolist() == [[1, 4, 5]]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    assert tokenizer.additional_special_tokens == ["<x>"]
    assert tokenizer.special_tokens_map["additional_special_tokens"] == ["<x>"]


def test_it_answers_and_stops_where_the_model_ends(spoken: Path) -> None:
    checkpoint = Checkpoint.open(spoken, trust_remote_code=True)
    plan = duoka.plan(checkpoint, "virtual:2x64MiB", WORK, use_all=True)
    reader = PromptReader.open(checkpoint, plan.workload)
    assert reader.chat.stop_ids == (2,)
    prompt = reader.prompt("hello")
    model = duoka.load(plan, trust_remote_code=True)
    with duoka.Engine(plan, processes=False, trust_remote_code=True) as engine:
        answer = engine.submit(prompt, duoka.SamplingParams(max_new_tokens=4)).result()
    assert answer.text == plain_generate.answer(model, reader, prompt, 4).text


def test_it_runs_only_where_it_is_trusted(spoken: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenization_heron\.py, which isn't allowed to run"
    ):
        duoka.tokenizer(spoken)


@pytest.mark.parametrize("what", ["import not_a_package\n", "from not_a_package.x import y\n"])
def test_a_package_that_is_missing_is_named(spoken: Path, what: str) -> None:
    file = spoken / "tokenization_heron.py"
    file.write_text(what + file.read_text())
    with pytest.raises(ModelError) as error:
        duoka.tokenizer(spoken, trust_remote_code=True)
    assert error.value.hint == (
        "the code needs not_a_package, which isn't installed; see the model's page"
    )


def test_code_of_a_tokenizer_alone(spoken: Path) -> None:
    """The model is one that transformers has; what is trusted is the tokenizer's code."""
    config = json.loads((spoken / "config.json").read_text())
    del config["auto_map"]
    (spoken / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    checkpoint = Checkpoint.open(spoken, trust_remote_code=True)
    assert not checkpoint.builds_own_model
    assert "tokenization_heron.py" in dict(checkpoint.remote_code)
    assert duoka.tokenizer(checkpoint).encode("b") == [1, 5]


class Pairs(LegacyTokenizer):
    """Hands to tiktoken what it is asked with."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        ranks = {bytes([number]): number for number in range(256)}
        special = {"<end>": 256}
        self.own = tiktoken.Encoding(
            "own", pat_str=".", mergeable_ranks=ranks, special_tokens=special
        )

    @property
    def vocab_size(self) -> int:
        return self.own.n_vocab

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.own._special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(256)}

    def convert_tokens_to_ids(self, tokens: list[int]) -> list[int]:
        return tokens

    def tokenize(self, text: str, **kwargs: object) -> list[int]:
        return self.own.encode(text, **kwargs)


def test_special_tokens_are_text_in_the_words_of_tiktoken() -> None:
    tokenizer = Pairs()
    assert tokenizer.encode("<end>", split_special_tokens=True) == list(b"<end>")
    assert tokenizer.encode("<end>", split_special_tokens=False) == [256]
    assert tokenizer("<end>", allowed_special=set())["input_ids"] == list(b"<end>")
    assert tokenizer.added_tokens_decoder[256].special
