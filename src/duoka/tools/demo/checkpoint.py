"""A small checkpoint in ChatGLM3's published format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import nn

from duoka.base.files import set_new_mode
from duoka.models import chatglm
from duoka.models.text.prompts import chat_format
from duoka.models.text.tokenizer import load_tokenizer

from .training import Report, load_pairs, train, write_dialogue

_SEED = 20
_SHARD_SIZE = "2MB"
# As published: `auto_map` names code files, which the demo neither writes nor runs.
CONFIG: dict[str, Any] = json.loads(
    resources.files(__package__).joinpath("config.json").read_text(encoding="utf-8")
)
NUM_PIECES = 1340


def make_checkpoint(directory: Path, *, report: Report = lambda step, loss: None) -> None:
    """Train the demo's model, and write its checkpoint with tokenizer and sharded weights."""
    write_frame(directory, CONFIG)
    tokenizer = load_tokenizer(directory, CONFIG)
    write = partial(write_dialogue, tokenizer=tokenizer, chat=chat_format(tokenizer, CONFIG))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = fresh_model(CONFIG)
        train(model, load_pairs(), write, report)
    write_weights(directory, CONFIG, model)


def write_frame(directory: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration and a new tokenizer: everything but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = [text for pair in load_pairs() for text in (pair.question, pair.answer)]
    (directory / "tokenizer.model").write_bytes(train_vocabulary(texts))
    _write_json(directory / "config.json", config)


def write_weights(
    directory: Path, config: Mapping[str, Any], model: chatglm.ChatGLMForCausalLM
) -> None:
    """Write the weights in shards, with the parameter names of the published checkpoint."""
    chatglm.register()
    model.save_pretrained(directory, max_shard_size=_SHARD_SIZE)
    for file in directory.glob("*.safetensors"):
        set_new_mode(file)
    # `save_pretrained` has written a config with transformers' keys; restore the published keys.
    _write_json(directory / "config.json", config)
    (directory / "generation_config.json").unlink(missing_ok=True)


def fresh_model(config: Mapping[str, Any]) -> chatglm.ChatGLMForCausalLM:
    """Build a model with random weights."""
    model = chatglm.ChatGLMForCausalLM(chatglm.ChatGLMConfig(**config))
    # With larger embeddings and smaller residual branches, training takes a quarter of the steps.
    with torch.no_grad():
        nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config["num_layers"]) ** -0.5)
    return model


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train_vocabulary(texts: Iterable[str]) -> bytes:
    """Train a BPE vocabulary on texts; return the content of ``tokenizer.model``."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=NUM_PIECES,
        byte_fallback=True,
        split_digits=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
