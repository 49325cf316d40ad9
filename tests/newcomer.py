"""What a newcomer has who follows a page of docs/situations: checkpoints, data, a picture.

Three directories hold checkpoints under the same four names: `full` the published configs without
weights, for plans; `small` models of the same architectures with random weights, for what loads
one; `code` stand-ins for the code that comes with two of them, with the faults that it has.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_random
from image_checkpoints import GLM4V, GLM_4V_9B, write_glm4v
from PIL import Image

from duoka.models import chatglm
from duoka.tools.demo.checkpoint import CONFIG

NAMES = ("chatglm3-6b", "chatglm3-6b-128k", "glm-4-9b-chat", "glm-4v-9b")
_CODE = Path(__file__).parent / "models" / "transformers4" / "heron"
# As many layers as ChatGLM3 has, so that a map for it fits.
_CHATGLM3 = {
    **CONFIG,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 28,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "multi_query_group_num": 1,
    "seq_length": 256,
}


def write_all(root: Path, published: Path) -> None:
    """Write the three directories."""
    for name in NAMES[:3]:
        config = json.loads((published / "configs" / f"{name}.json").read_text())
        _write_config(root / "full" / name, config)
        for index in (published / "indices").glob(f"{name}.*"):
            shutil.copy(index, root / "full" / name / index.name.removeprefix(f"{name}."))
    _write_config(root / "full" / NAMES[3], GLM_4V_9B)
    small = root / "small"
    write_random(small / NAMES[0], _CHATGLM3, seed=1)
    long = {"num_layers": 2, "seq_length": 131072, "rope_ratio": 500}
    write_random(small / NAMES[1], {**_CHATGLM3, **long}, seed=2)
    _write_glm4(small / NAMES[2])
    write_glm4v(small / NAMES[3])
    _write_code(root / "code" / NAMES[1], joined_cache=True, seq_length=131072)
    _write_code(root / "code" / NAMES[2])
    Image.new("RGB", (60, 56), "red").save(root / "cat.jpg")
    (root / "book.txt").write_text("Call me Ishmael. " * 20)


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


def _write_glm4(directory: Path) -> None:
    """A tiny GLM-4 with a token for each byte."""
    config = {name: value for name, value in GLM4V.items() if name != "vision_config"}
    config |= {"seq_length": 512, "padded_vocab_size": 272, "pad_token_id": 256}
    config |= {"eos_token_id": 256}
    torch.manual_seed(4)
    model = chatglm.ChatGLMForCausalLM(chatglm.ChatGLMConfig(**config))
    chatglm.register()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (directory / "tokenizer.model").write_text("".join(ranks))


def _write_code(directory: Path, **settings: object) -> None:
    """Code as that of the ChatGLM family is written: `heron`, by their names."""
    named = {"HeronForCausalLM": "ChatGLMForConditionalGeneration", "Heron": "ChatGLM"}
    config = {
        "model_type": "chatglm",
        "torch_dtype": "float32",
        "transformers_version": "4.30.2",
        "auto_map": {
            "AutoConfig": "configuration_chatglm.ChatGLMConfig",
            "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
        },
    }
    _write_config(directory, config | settings)
    for stem in ("configuration", "modeling"):
        text = (_CODE / f"{stem}_heron.py").read_text()
        for old, new in {**named, "heron": "chatglm", "Encoder": "GLMTransformer"}.items():
            text = text.replace(old, new)
        (directory / f"{stem}_chatglm.py").write_text(text)
