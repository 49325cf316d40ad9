"""Tiny checkpoints of models that see, with a tokenizer and the files of an image processor."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import torch
import towers
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from duoka.models.glm4v import GLM4VConfig, GLM4VForConditionalGeneration, register

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_PARTS_ALONE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}PICTURE"
    "{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_SIDE = {"height": towers.IMAGE_SIZE, "width": towers.IMAGE_SIZE}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's processor needs: its tokens from id 3 on, and a picture in a template.

    Written out is a picture of 56x56 pixels.
    """

    processor: str
    image_processor: str
    picture: str
    tokens: tuple[str, ...]
    written_out: str
    named: dict[str, str] = field(default_factory=dict)
    pixels: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    template: str = _TEMPLATE


FAMILIES = {
    "llava": Family(
        processor="LlavaProcessor",
        image_processor="CLIPImageProcessorPil",
        picture="<image>",
        tokens=("<image>",),
        written_out="<image>" * 16,
        pixels={"size": {"shortest_edge": towers.IMAGE_SIZE}, "crop_size": _SIDE},
        settings={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        template=_PARTS_ALONE,
    ),
    "qwen2_vl": Family(
        processor="Qwen2VLProcessor",
        image_processor="Qwen2VLImageProcessorPil",
        picture="<|vision_start|><|image_pad|><|vision_end|>",
        tokens=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        written_out="<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>",
    ),
    "glm4v": Family(
        processor="Glm4vProcessor",
        image_processor="Glm4vImageProcessorPil",
        picture="<|begin_of_image|><|image|><|end_of_image|>",
        tokens=("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        written_out="<|begin_of_image|>" + "<|image|>" * 9 + "<|end_of_image|>",
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "gemma3": Family(
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessorPil",
        picture="<start_of_image>",
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        written_out=f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n",
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        pixels={"size": _SIDE},
        settings={"image_seq_length": 4},
    ),
    "internvl": Family(
        processor="InternVLProcessor",
        image_processor="GotOcr2ImageProcessorPil",
        picture="<IMG_CONTEXT>",
        tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        written_out=f"<img>{'<IMG_CONTEXT>' * 4}</img>",
        named={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        pixels={"size": _SIDE},
        settings={"image_seq_length": 4},
    ),
}


def write_family(name: str, directory: Path) -> Path:
    """Write a tiny model of transformers with random weights, its tokenizer and processor."""
    family = FAMILIES[name]
    config: Any = towers.configuration(name)
    config.text_config.vocab_size = 300
    config.text_config.max_position_embeddings = 256
    if name == "internvl":
        config.vision_config.image_size = [towers.IMAGE_SIZE] * 2
    torch.manual_seed(7)
    model = towers._model_class(name, causal=False)(config)
    families._spread(model)  # or some say the same of every picture
    model.save_pretrained(directory)
    _tokenizer(family).save_pretrained(directory)
    getattr(transformers, family.image_processor)(**family.pixels).save_pretrained(directory)
    settings = {"processor_class": family.processor, **family.settings}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return directory


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    special = ("<pad>", "<bos>", "<eos>", *family.tokens)
    vocabulary = {token: number for number, token in enumerate(special)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=family.named,
        chat_template=family.template.replace("PICTURE", family.picture),
    )


def write_glm4v(directory: Path, tokenizer: Path | None = None) -> Path:
    """Write a tiny model in GLM-4V-9B's published format, with a published tokenizer's file.

    Without one there is a token for each byte.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
        (directory / "tokenizer.model").write_text("".join(ranks))
        first = 256
    else:
        shutil.copy(tokenizer, directory / "tokenizer.model")
        first = 151329
    config = {
        **GLM4V,
        "padded_vocab_size": first + 16,
        "boi_token_id": first + 10,
        "eoi_token_id": first + 11,
        "eos_token_id": [first, first + 7, first + 9],
        "pad_token_id": first,
    }
    torch.manual_seed(5)
    register()
    model = GLM4VForConditionalGeneration(GLM4VConfig(**config))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


GLM4V: dict[str, Any] = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": 96,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 4,
    "original_rope": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 512,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "vision_config": {
        "dropout_prob": 0.0,
        "hidden_act": "gelu",
        "in_channels": 3,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "patch_size": 14,
        "num_heads": 2,
        "intermediate_size": 48,
        "layer_norm_eps": 1e-06,
        "num_positions": 17,
        "image_size": 56,
        "scaling_factor": 8,
    },
}
GLM_4V_9B: dict[str, Any] = {
    **GLM4V,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_layers": 40,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_group_num": 2,
    "padded_vocab_size": 151552,
    "seq_length": 8192,
    "torch_dtype": "bfloat16",
    "boi_token_id": 151339,
    "eoi_token_id": 151340,
    "vision_config": {
        "hidden_size": 1792,
        "num_hidden_layers": 63,
        "num_heads": 16,
        "intermediate_size": 15360,
        "patch_size": 14,
        "image_size": 1120,
        "num_positions": 6401,
    },
}
