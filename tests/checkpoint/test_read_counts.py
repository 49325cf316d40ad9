"""Which files of a checkpoint are opened, and how much of them is read: what planning waits for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import duoka
from duoka.checkpoint import headers

pytestmark = pytest.mark.usefixtures("single_sequences")

GPUS = "virtual:2x64MiB"
WORK = duoka.Workload(prompt_tokens=64, new_tokens=32)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="300KB")
    return path


class Reads:
    """Shards that are opened, bytes of headers that are parsed, and of weights that are read."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.opened: Counter[str] = Counter()
        self.header_bytes = self.weight_bytes = 0
        opening, reading, parse = os.open, os.preadv, headers.parse_header

        def open_file(path: Any, *arguments: Any, **options: Any) -> int:
            if str(path).startswith(str(root)):
                self.opened[Path(path).name] += 1
            return opening(path, *arguments, **options)

        def read(descriptor: int, buffers: Any, *arguments: Any) -> int:
            got = reading(descriptor, buffers, *arguments)
            self.weight_bytes += got
            return got

        def parse_header(text: bytes, *arguments: Any) -> Any:
            self.header_bytes += len(text)
            return parse(text, *arguments)

        patch.setattr(os, "open", open_file)
        patch.setattr(os, "preadv", read)
        patch.setattr(headers, "parse_header", parse_header)


@pytest.fixture
def reads(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    with monkeypatch.context() as patch:
        yield Reads(sharded, patch)


def shards(root: Path) -> list[str]:
    names = sorted(path.name for path in root.glob("*.safetensors"))
    assert len(names) == 4
    return names


def test_a_plan_reads_each_header_once(sharded: Path, reads: Reads) -> None:
    sizes = [headers.LENGTH_BYTES + _header_bytes(sharded / name) for name in shards(sharded)]
    duoka.plan(sharded, GPUS, WORK)
    assert {name: reads.opened[name] for name in shards(sharded)} == dict.fromkeys(
        shards(sharded), 1
    )
    assert reads.header_bytes == sum(sizes) - headers.LENGTH_BYTES * len(sizes)
    assert reads.weight_bytes == 0
    assert reads.opened["model.safetensors.index.json"] == 1


def _header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[: headers.LENGTH_BYTES], "little")


def test_loading_reads_each_byte_of_the_weights_once(sharded: Path, reads: Reads) -> None:
    plan = duoka.plan(sharded, GPUS, WORK, use_all=True)
    reads.opened.clear()
    model: Any = duoka.load(plan)
    # Their headers before the plan is proved and behind that, when they may be others; the weights.
    assert {name: reads.opened[name] for name in shards(sharded)} == dict.fromkeys(
        shards(sharded), 2
    )
    assert reads.weight_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()
    )
