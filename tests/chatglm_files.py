"""ChatGLM's and GLM-4's published files without the files: facts, and weights made from seeds.

`data/models/published.json` holds what configs and checkpoint indices say. `data/models/NAME-tiny`
holds what the original code computed with a tiny model of random weights; the weights are made here
from the same seed as PyTorch's generator made them, to the last bit or its neighbour, without it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODELS = Path(__file__).parent / "data" / "models"
FACTS: dict[str, Any] = json.loads((MODELS / "published.json").read_text())

Array = np.ndarray[Any, np.dtype[np.float32]]


def write_all(root: Path) -> None:
    """Write configs, indices, lists of weights, and the tiny models with their outputs."""
    for folder in ("configs", "indices", "state_dicts", "reference"):
        (root / folder).mkdir()
    for name in FACTS["configs"]:
        _dump(config(name), root / "configs" / f"{name}.json")
    for name, facts in FACTS["weights"].items():
        listed = {"parameters": facts["parameters"], "shapes": dict(shapes(name))}
        _dump(listed, root / "state_dicts" / f"{name}.json")
        if "index" in facts:
            _dump(index(name), root / "indices" / f"{name}.{facts['index']}")
    for source in MODELS.glob("*-tiny"):
        write_tiny(source, root / "reference" / source.name)


def config(name: str) -> dict[str, Any]:
    """A published config.json."""
    return {**FACTS["config"], **FACTS["configs"][name]}


def shapes(name: str) -> Iterator[tuple[str, list[int]]]:
    """Every tensor of a published checkpoint with its shape, in the order of the model."""
    facts = FACTS["weights"][name]
    of_layers = [item for item in facts["shapes"].items() if "*" in item[0]]
    for key, shape in facts["shapes"].items():
        if "*" not in key:
            yield key, shape
        elif key == of_layers[0][0]:
            for layer in range(facts["num_layers"]):
                yield from ((each.replace("*", str(layer)), size) for each, size in of_layers)


def index(name: str) -> dict[str, Any]:
    """A published checkpoint index: the tensors are dealt to the files in the model's order."""
    facts = FACTS["weights"][name]
    files, number = {}, 0
    for key, _ in shapes(name):
        number += key in facts["first_in_file"]
        files[key] = facts["file"].format(number)
    return {
        "metadata": {"total_size": facts["total_size"]},
        "weight_map": dict(sorted(files.items())),
    }


def write_tiny(source: Path, target: Path) -> None:
    """Write a tiny model in the original format, beside what the original code computes on it."""
    shutil.copytree(source, target)
    sizes = json.loads((source / "config.json").read_text())
    seed = json.loads((source / "reference.json").read_text())["seed"]
    normals = Normals(seed + 1)
    weights = {key: _weight(key, shape, normals) for key, shape in _tiny_shapes(sizes)}
    channels = np.arange(0, sizes["kv_channels"] // 2, 2, dtype=np.float32)
    base = np.float32(10000) ** (channels / np.float32(sizes["kv_channels"] // 2))
    weights["transformer.rotary_pos_emb.inv_freq"] = np.float32(1) / base
    save_file(dict(sorted(weights.items())), target / "model.safetensors", {"format": "pt"})


def _tiny_shapes(sizes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a tiny model in the order in which they were drawn."""
    hidden, inner = sizes["hidden_size"], sizes["ffn_hidden_size"]
    heads = sizes["num_attention_heads"] + 2 * sizes["multi_query_group_num"]
    vocabulary = (sizes["padded_vocab_size"], hidden)
    yield "transformer.embedding.word_embeddings.weight", vocabulary
    for layer in range(sizes["num_layers"]):
        prefix = f"transformer.encoder.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        rows = heads * sizes["kv_channels"]
        yield f"{prefix}self_attention.query_key_value.weight", (rows, hidden)
        yield f"{prefix}self_attention.query_key_value.bias", (rows,)
        yield f"{prefix}self_attention.dense.weight", (hidden, hidden)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.dense_h_to_4h.weight", (2 * inner, hidden)
        yield f"{prefix}mlp.dense_4h_to_h.weight", (hidden, inner)
    yield "transformer.encoder.final_layernorm.weight", (hidden,)
    yield "transformer.output_layer.weight", vocabulary


def _weight(key: str, shape: tuple[int, ...], normals: Normals) -> Array:
    values = normals.draw(shape)
    if "embedding" in key:
        return values * np.float32(0.5)
    if key.endswith("layernorm.weight"):
        return np.float32(1) + np.float32(0.1) * values
    if key.endswith("bias"):
        return values * np.float32(0.05)
    return values * np.float32(1.4 / shape[-1] ** 0.5)


class Normals:
    """Normally distributed numbers as `torch.randn` draws them after `torch.manual_seed`.

    That is the Mersenne twister, 24 bits of each draw as a uniform number, and Box and Muller's
    transform of eight with the next eight; NumPy promises the twister's draws for good.
    """

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed)

    def draw(self, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape))
        assert size % 16 == 0, "PyTorch draws the rest in another way"
        bits = self._twister.randint(0, 2**32, size=size, dtype=np.uint32)
        uniform = (bits & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2**-24)
        first, second = uniform.reshape(-1, 2, 8).transpose(1, 0, 2)
        radius = np.sqrt(np.float32(-2) * _rounded(np.log, np.float32(1) - first))
        angle = np.float32(2 * np.pi) * second
        pairs = (radius * _rounded(np.cos, angle), radius * _rounded(np.sin, angle))
        return np.stack(pairs, axis=1).reshape(shape)


def _rounded(function: Callable[[Any], Any], values: Array) -> Array:
    """A function's values, right to the last bit: in float32 that depends on the processor."""
    rounded: Array = function(values.astype(np.float64)).astype(np.float32)
    return rounded


def _dump(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
