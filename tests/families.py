"""Tiny models of many transformers families, for tests that hold duoka against all of them.

A family is a `model_type`. Its configuration is the class's own default with the sizes below put
in wherever it has a field of that name; what no rule can know stands in `_SPECIAL`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import io
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from turns import in_turn

FAST = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "phi",
    "phi3", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt", "opt",
    "codegen", "cohere", "cohere2", "olmo", "olmo2", "stablelm", "starcoder2", "persimmon",
    "biogpt", "xglm", "granite", "helium", "smollm3", "nemotron", "apertus", "arcee", "exaone4",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoe", "gpt_oss", "phimoe",
    "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "recurrent_gemma", "qwen3_next",
    "t5", "bart", "mbart", "m2m_100", "pegasus", "umt5",
)  # fmt: skip
"""The common families, tested at every commit: dense, experts, state space, encoder-decoder."""

PAGED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "phi",
    "phi3", "gpt2", "gpt_neox", "gpt_bigcode", "opt", "cohere", "cohere2", "olmo", "olmo2",
    "starcoder2", "persimmon", "granite", "helium", "smollm3", "apertus", "arcee", "exaone4",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoe", "gpt_oss", "phimoe",
)  # fmt: skip
"""Those of them that can keep keys and values in pages."""

QUICK = ("glm", "mixtral")
"""Those of them that `make test` takes: a dense model, and a mixture of experts."""

VOCABULARY = 99

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "model_dim": 32,
    "n_embed": 32, "word_embed_proj_dim": 32, "embedding_size": 32, "emb_dim": 32,
    "intermediate_size": 48, "ffn_hidden_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48,
    "dim_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "ffn_size": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "rotary_dim": 4, "sliding_window": 16, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "context_length": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4, "conv_kernel": 4, "lru_width": 32,
    "attention_hidden_size": 32, "time_step_rank": 4, "mamba_dt_rank": 4, "chunk_size": 8,
    "mamba_chunk_size": 8, "attention_window_size": 8, "sliding_window_size": 16,
    "attention_chunk_size": 16, "keep_window_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_NO_DROPOUT = ("dropout", "drop", "pdrop")

_MLA: dict[str, Any] = {"num_key_value_heads": 4}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        **_LINEAR,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": None},
    "axk2": _MLA,
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
    },
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "hrm_text": {"H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minicpm3": _MLA,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "t5": {"decoder_start_token_id": 0},
    "youtu": _MLA,
    "zaya": {"num_experts_per_tok": 1},
}

UNBUILT = {
    "towers of vision or sound at their full size": (
        "audioflamingo3", "blt", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified",
        "git", "glmasr", "got_ocr2", "granite_speech", "granite_speech_plus", "llama4", "mllama",
        "moss_transcribe_diarize", "musicflamingo", "musicgen", "musicgen_melody", "nemo_speechlm",
        "phi4_multimodal", "qwen2_audio", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen4_exp",
        "t5gemma", "t5gemma2", "vibevoice_asr", "voxtral", "voxtral_realtime", "encoder-decoder",
        "dots3_note", "seamless_m4t", "seamless_m4t_v2",
    ),
    "a configuration that the rules above don't make": (
        "bailing_hybrid", "cohere_compass_text", "dbrx", "dots3_note_text", "gemma3n_text",
        "gemma4_assistant", "gemma4_text", "gemma4_unified_assistant", "granitemoehybrid",
        "kimi_linear", "longcat_flash", "qwen4_exp_text", "reformer", "xmod", "zamba", "zamba2",
    ),
    "fails on the CPU as well": ("fsmt", "longt5", "rwkv", "switch_transformers", "xlstm"),
}  # fmt: skip
"""Families that aren't held against the CPU, by reason."""


def families(names: Any = None) -> dict[str, tuple[type[PreTrainedModel], PretrainedConfig]]:
    """Return model class and tiny configuration of each family, by `model_type`."""
    return {name: (_model_class(name), _configuration(name)) for name in names or all_names()}


def all_names() -> list[str]:
    """Name every family that transformers has a causal or a sequence-to-sequence class for."""
    causal, paired = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return sorted({*causal, *paired})


def built_names() -> list[str]:
    """Name every family that is held against the CPU."""
    unbuilt = {name for names in UNBUILT.values() for name in names}
    return [name for name in all_names() if name not in unbuilt]


def by_turn(quick: Collection[str], common: Collection[str], others: Iterable[str]) -> list[Any]:
    """Make parameters: quick ones for `make test`, common ones, and others by turn (`turns`)."""
    others = sorted(set(others) - set(common))
    marks = {name: () if name in quick else pytest.mark.slow for name in common}
    due = frozenset(in_turn(others))
    marks |= {name: pytest.mark.slow if name in due else pytest.mark.nightly for name in others}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


class Family:
    """A family's tiny model, built once, and its results on the CPU, computed once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = build(name)

    def model(self) -> Any:
        """Return a copy of the model, which was never called: calls may leave a state."""
        return copy.deepcopy(self._model)

    @functools.cached_property
    def results(self) -> Results:
        """Logits, tokens, loss and gradients on the CPU."""
        return measure(self.model())


def build(name: str, *, seed: int = 0, sizes: dict[str, Any] | None = None) -> PreTrainedModel:
    """Build a family's tiny model with random weights, in eval mode; `sizes` change the config."""
    torch.manual_seed(seed)
    # Importing a family's module may warn as well as building its model.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model = _model_class(name)(_configuration(name, sizes))
    _spread(model)
    return model.eval()


def inputs(
    model: PreTrainedModel, *, num_tokens: int = 7, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Make a small batch of inputs, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (2, num_tokens), generator=generator)
    batch = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    return batch


@dataclass(frozen=True)
class Results:
    """What a model computes on one batch, on the CPU."""

    logits: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def measure(model: PreTrainedModel, device: str = "cpu") -> Results:
    """Run forward, greedy generation, and loss with backward, on a model that takes `device`."""
    batch = {name: value.to(device) for name, value in inputs(model).items()}
    labels = batch.get("decoder_input_ids", batch["input_ids"])
    with torch.no_grad():
        logits = model(**batch).logits
    prompt = batch["input_ids"]
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
    )
    batch.pop("decoder_input_ids", None)
    model.zero_grad()
    loss = model(**batch, labels=labels).loss
    loss.backward()
    gradients = {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return Results(logits.cpu(), tokens.cpu(), loss.detach().cpu(), gradients)


def differences(expected: Results, found: Results, *, tolerance: float = 1e-5) -> list[str]:
    """List what differs between two runs, by more than the tolerance, relative to the largest."""
    problems = []
    if not torch.equal(expected.tokens, found.tokens):
        problems.append("generated tokens")
    if expected.gradients.keys() != found.gradients.keys():
        problems.append("which parameters have gradients")
    pairs = [("logits", expected.logits, found.logits), ("loss", expected.loss, found.loss)]
    pairs += [
        (f"gradient of {name}", value, found.gradients[name])
        for name, value in expected.gradients.items()
        if name in found.gradients
    ]
    for what, here, there in pairs:
        # Infinities (a masked vocabulary) must agree; subtracted they give no number.
        finite = here.isfinite()
        if not torch.equal(here[~finite], there[~finite]):
            problems.append(f"what is finite in {what}")
            continue
        scale = max(1.0, here[finite].abs().max().item() if finite.any() else 1.0)
        worst = (here - there)[finite].abs().max().item() if finite.any() else 0.0
        if worst > tolerance * scale:
            problems.append(f"{what} by {worst:.1e}")
    return problems


def _spread(model: PreTrainedModel) -> None:
    """Make random weights larger: with transformers' own, every token scores the same."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


def _model_class(name: str) -> type[PreTrainedModel]:
    names = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    chosen = names.get(name) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    module = importlib.import_module("transformers")
    return getattr(module, chosen if isinstance(chosen, str) else chosen[0])


def _configuration(name: str, sizes: dict[str, Any] | None = None) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[name]
    return config_class(**_fields(config_class, _SPECIAL.get(name, {}), sizes or {}))


def _fields(
    config_class: type[PretrainedConfig], special: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    sizes = {**_SIZES, **sizes}
    fields: dict[str, Any] = {}
    for field, parameter in inspect.signature(config_class.__init__).parameters.items():
        if field in sizes:
            fields[field] = sizes[field]
        elif isinstance(parameter.default, float) and field.endswith(_NO_DROPOUT):
            fields[field] = 0.0
    return {**fields, **special}
