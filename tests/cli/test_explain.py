"""What ``duoka plan`` hands out besides the plan."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from progress import without_progress

from .conftest import GPUS, SIZES, Program


def test_a_plan_is_explained(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done = program("plan", tiny, *GPUS, *SIZES, "--use-all", "--explain", "--save", saved)
    assert done.returncode == 0
    assert "No more modules: with" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    again = program("plan", "--plan", saved, "--explain")
    assert again.stdout == done.stdout
    data = json.loads(program("plan", "--plan", saved, "--explain", "--json").stdout)
    assert {share["device"] for share in data["shares"]} == {"vgpu:0", "vgpu:1"}


def test_without_the_profile_a_saved_plan_is_not_explained(
    tiny: Path, program: Program, tmp_path: Path, environment: dict[str, str]
) -> None:
    saved = tmp_path / "plan.json"
    program("plan", tiny, *GPUS, *SIZES, "--save", saved)
    cache = environment["DUOKA_CACHE"]
    environment["DUOKA_CACHE"] = str(tmp_path / "empty")
    try:
        done = program("plan", "--plan", saved, "--explain")
    finally:
        environment["DUOKA_CACHE"] = cache
    assert done.returncode == 2
    assert "no profile of ChatGLMForCausalLM in the cache" in done.stderr


def test_a_plan_is_exported(tiny: Path, program: Program) -> None:
    done = program("plan", tiny, *GPUS, *SIZES, "--export", "vllm")
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "vllm serve" in done.stdout
    assert "--max-model-len 96" in done.stdout


def test_a_plan_is_exported_for_a_gguf_file(tiny: Path, program: Program, tmp_path: Path) -> None:
    gguf, file = pytest.importorskip("gguf"), tmp_path / "my model.gguf"
    writer = gguf.GGUFWriter(file, "chatglm")
    writer.add_block_count(3)
    writer.add_tensor("blk.2.attn_q.weight", np.zeros(1024, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = program("plan", tiny, *GPUS, *SIZES, "--export", "llama.cpp", "--gguf", file)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert f"--model '{file}'" in done.stdout
    assert "2.00 KiB of weights in the file" in done.stdout


# Qwen3-4B's, whose head is tied to its embedding.
TIED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "max_position_embeddings": 40960,
}


def test_an_export_plans_in_stages_that_the_tool_takes(program: Program, tmp_path: Path) -> None:
    """The fastest plan on three unequal GPUs has the embedding on one of its own."""
    config, saved = tmp_path / "config.json", tmp_path / "plan"
    config.write_text(json.dumps(TIED))
    gpus = ("--gpus", "1xRTX5090+2xRTX3090", "--use-all", "--context", "32K")
    done = program("plan", config, *gpus, "--export", "llama.cpp", "--save", saved)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.replace("\n#  ", " ").split())
    pins = told.partition("Pinned: ")[2].partition(". # ")[0].split()
    assert pins[:2] == ["--pin", "model.embed_tokens=cuda:0"]
    split = done.stdout.rpartition("--tensor-split ")[2].split()[0]
    counts = [int(count) for count in split.split(",")]
    # Its head and the layer that predicts further tokens, which other files have, are counted.
    assert (len(counts), sum(counts)) == (3, 36 + 2)
    assert "lm_head is tied and runs on" in done.stdout
    # The plan that is saved is the one that was exported, and asked for by its pins the same.
    assert program("plan", "--plan", saved, "--export", "llama.cpp").stdout == done.stdout
    assert program("plan", config, *gpus, *pins, "--export", "llama.cpp").stdout == done.stdout
