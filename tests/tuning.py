"""Small checkpoints with a tokenizer and a chat template, and data to fine-tune them on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from duoka.tuner.run import RunDirectory
from duoka.tuner.worker import work

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Large enough for its own memory to be more than rounding.
LARGE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
}
LATENTS: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "latents": lambda: DeepseekV3Config(**LATENTS, first_k_dense_replace=1),
    "dense latents": lambda: Glm4MoeLiteConfig(**LATENTS, mlp_layer_types=["dense"] * 2),
    "llama": lambda: LlamaConfig(**SIZES),
    "shallow": lambda: LlamaConfig(**{**SIZES, "num_hidden_layers": 2}),
    "tied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "biases": lambda: Qwen2Config(**SIZES),
    "large": lambda: LlamaConfig(**LARGE),
    "large in bfloat16": lambda: LlamaConfig(**LARGE, dtype="bfloat16"),
    "drops": lambda: GPT2Config(
        vocab_size=SIZES["vocab_size"],
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
        eos_token_id=0,
        bos_token_id=0,
    ),
    "experts": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    # Wide enough for every kind of quantized experts.
    "wide experts": lambda: MixtralConfig(
        **{**SIZES, "hidden_size": 64, "intermediate_size": 64}, num_local_experts=8
    ),
}


def write_model(family: str, path: Path) -> Path:
    """A checkpoint with random weights, large enough that its answers differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def write_of_config(path: Path, **config: Any) -> Path:
    """A checkpoint of a configuration in bfloat16, with random weights and a tokenizer."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and a chat template of the common kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = TEMPLATE
    return fast


def write_chats(path: Path, number: int = 16) -> Path:
    """Questions and answers of different lengths."""
    rows = (
        {
            "messages": [
                {"role": "user", "content": f"{number}+{number}?"},
                {"role": "assistant", "content": f"{2 * number}" + "!" * (number % 5)},
            ]
        }
        for number in range(number)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def losses(directory: Path) -> list[float]:
    """The loss of every step of a run."""
    metrics = RunDirectory(directory).read_metrics()
    return [entry["loss"] for entry in metrics if "loss" in entry]


@contextmanager
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of one process are this one, which saves the start of another."""
    with socket.socket() as listener, monkeypatch.context() as patch:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        for name, value in (
            ("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):  # fmt: skip
            patch.setenv(name, value)

        class Here:
            def __init__(
                self, module: str, size: int, arguments: Sequence[str], **options: object
            ) -> None:
                assert size == 1
                self._directory = RunDirectory(Path(arguments[0]))

            def __enter__(self) -> Here:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def wait(self) -> dict[int, int]:
                work(self._directory)
                return {}

        patch.setattr("duoka.tuner.tune.WorkerGroup", Here)
        listener.close()
        try:
            yield
        finally:
            # A run that fails leaves its group, as the process is to end.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
