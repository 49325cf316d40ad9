"""A small model with a tokenizer, whole or spread, for scripts that know nothing of either.

`python tests/scripts/placing.py` runs every script in three ways and writes which did the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1]))

import duoka
from duoka import virtual

SCRIPTS = (
    "trainer",
    "peft_trainer",
    "accelerator_loop",
    "lm_eval",
    "sentence_scores",
    "pooled_embeddings",
    "text_pipeline",
    "streamers",
    "transition_scores",
    "assisted",
    "beam_search",
)
DEVICES = ("vgpu:0", "vgpu:1")
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<end>", *letters])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        chat_template=_TEMPLATE,
    )


@functools.cache
def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def device_map() -> dict[str, str]:
    """Where the modules go: the embedding first, the head last."""
    first, last = DEVICES
    layers = {f"model.layers.{index}": DEVICES[index // 2] for index in range(4)}
    return {"model.embed_tokens": first, "model.rotary_emb": first, **layers} | {
        "model.norm": last,
        "lm_head": last,
    }


def placed(how: str) -> LlamaForCausalLM:
    """A model of its own on one device, or spread by accelerate or by duoka."""
    model = copy.deepcopy(_model())
    if how == "accelerate":
        from accelerate import dispatch_model

        return dispatch_model(model, device_map(), main_device=DEVICES[0])
    if how == "duoka":
        return duoka.dispatch(model, device_map())
    return model  # on the CPU, where Trainer and Accelerator would bring it: they see no GPU


def result(script: str, how: str) -> Any:
    """What a script returns with a model that is placed so."""
    model = placed(how)  # building it the first time draws random numbers
    torch.manual_seed(3)
    return import_module(f"scripts.{script}").run(model, tokenizer())


def alike(found: list[Any], expected: list[Any]) -> bool:
    """Whether two runs are one: texts and tokens equal, numbers as good as equal."""
    if isinstance(expected[0], float):
        return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-5))
    return found == expected


def _told(script: str, how: str) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found, expected = result(script, how), result(script, "one")
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return "the same" if alike(found, expected) else "other results"


def _main() -> None:
    warnings.simplefilter("ignore")
    virtual.set_gpus([None, None])
    sys.stdout.write("| script | accelerate | duoka |\n|---|---|---|\n")
    for script in SCRIPTS:
        told = " | ".join(_told(script, how) for how in ("accelerate", "duoka"))
        sys.stdout.write(f"| {script} | {told} |\n")


if __name__ == "__main__":
    _main()
