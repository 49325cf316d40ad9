"""A small checkpoint in ChatGLM3's published format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import nn
from transformers.utils import logging

from duoka.base.files import set_new_mode
from duoka.models import chatglm
from duoka.models.text.prompts import chat_format
from duoka.models.text.tokenizer import load_tokenizer

from .training import Pair, Report, load_pairs, train, write_dialogue

_SEED = 20
_SHARD_SIZE = "2MB"
_CODE = "chatglm.ChatGLMForConditionalGeneration"
CONFIG: dict[str, Any] = {
    "_name_or_path": "duoka/chatglm3-demo",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    # As published. The code that it names doesn't lie in the directory: nothing here runs it.
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": f"modeling_{_CODE}",
        "AutoModelForCausalLM": f"modeling_{_CODE}",
        "AutoModelForSeq2SeqLM": f"modeling_{_CODE}",
    },
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 512,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 192,
    "kv_channels": 48,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 1360,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 1024,
    "use_cache": True,
    "torch_dtype": "float32",
    "transformers_version": "4.30.2",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NUM_PIECES = 1340


def make_checkpoint(directory: Path, *, report: Report = lambda step, loss: None) -> None:
    """Make the demo's checkpoint: tokenizer, configuration, trained weights in shards."""
    pairs = load_pairs()
    write_frame(directory, CONFIG)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = fresh_model(CONFIG)
        _train(model, pairs, directory, report)
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
    """Write the weights under their published names, in shards."""
    chatglm.register()
    with _quiet():
        model.save_pretrained(directory, max_shard_size=_SHARD_SIZE)
    for file in directory.glob("*.safetensors"):
        set_new_mode(file)
    # transformers has written its own names of the settings; the published file has others.
    _write_json(directory / "config.json", config)
    (directory / "generation_config.json").unlink(missing_ok=True)


def fresh_model(config: Mapping[str, Any]) -> chatglm.ChatGLMForCausalLM:
    """Build an untrained model."""
    model = chatglm.ChatGLMForCausalLM(chatglm.ChatGLMConfig(**config))
    # Larger embeddings and smaller residual branches than usual: a quarter of the steps.
    with torch.no_grad():
        nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config["num_layers"]) ** -0.5)
    return model


def _train(
    model: chatglm.ChatGLMForCausalLM, pairs: Sequence[Pair], directory: Path, report: Report
) -> int:
    tokenizer = load_tokenizer(directory, CONFIG)
    chat = chat_format(tokenizer, CONFIG)
    return train(model, pairs, lambda dialogue: write_dialogue(dialogue, tokenizer, chat), report)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable transformers' progress bars within a scope."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train_vocabulary(texts: Iterable[str]) -> bytes:
    """Train the vocabulary of some texts; return the content of ``tokenizer.model``."""
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
