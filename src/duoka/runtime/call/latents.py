"""Multi-head latent attention (MLA) over pages of latents.

A token's keys and values of all heads are products of one latent with the weight of `kv_b_proj`,
and a part of each key with a rotary embedding is the same in all heads. transformers' modules
expand both in `expand_kv`, before attention. While a model is open over pages of latents, that
method joins them instead, and the expansion moves to the other side of the products ("absorbed",
DeepSeek-V2, 2024, section 2.1): with the key half K of the weight and the value half V,

    q · (K c) = (Kᵀ q) · c                  queries are multiplied by K, not the keys
    Σ w (V c) = V Σ w c                     results are multiplied by V, not the values

so that attention has one key head, [latent, rotary part], whose latents are its values, too.

GLM-4.7-Flash has 20 heads, keys of 192 + 64 and values of 256 numbers: 20 × (256 + 256) numbers for
each token in a layer. Its latents and rotary parts have 512 + 64: an 18th. The products of a query
with a key and a value are over 576 + 512 numbers instead of 256 + 256: decode steps read the cache
for longer than they multiply, but the attention of prefill chunks takes twice the arithmetic. To
expand a sequence's latents for a chunk would halve that, and take a workspace for the keys and
values of a whole context, which latents save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from duoka.models.quantization.composed import is_composed
from duoka.models.quantization.weights import computes_in


def keep_latents(model: nn.Module) -> None:
    """Let the attention modules of a model pass latents instead of keys and values."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for module in modules:
        module.expand_kv = _join


def expand_again(model: nn.Module) -> None:
    """Undo `keep_latents`."""
    for module in model.modules():
        vars(module).pop("expand_kv", None)


def keeps_latents(module: nn.Module) -> bool:
    """Return True if an attention module passes latents."""
    return "expand_kv" in vars(module)


def _join(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents and rotary parts, both [1, 1, tokens, …], as the keys and values of a head."""
    joined = torch.cat((latents, rotary), dim=-1)
    return joined, joined[..., : latents.shape[-1]]


def halves(module: Any, unpacked: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weights of keys, [heads, key dim, rank], and of values, [heads, rank, value dim].

    The weight is read at each call, as offloaded weights are on the GPU only for the layer's call.
    A quantized one, of a checkpoint, is unpacked at the layer's first call, into `unpacked`.
    """
    weight = module.kv_b_proj.weight
    if is_composed(weight) and module.layer_idx not in unpacked:
        units = torch.eye(weight.shape[1], dtype=computes_in(weight), device=weight.device)
        unpacked[module.layer_idx] = module.kv_b_proj(units).T.contiguous()
    weight = unpacked.get(module.layer_idx, weight)
    dims = module.qk_nope_head_dim, module.v_head_dim
    keys, values = weight.unflatten(0, (-1, sum(dims))).split(dims, dim=1)
    return keys, values.transpose(1, 2)


def absorb_queries(keys: Tensor, query: Tensor) -> Tensor:
    """Return queries for the joined keys: [1, heads, tokens, key dim] to […, rank + rotary dim]."""
    plain, rotary = query[0].split((keys.shape[1], query.shape[-1] - keys.shape[1]), dim=-1)
    return torch.cat((torch.bmm(plain, keys), rotary), dim=-1)[None]


def expand_values(values: Tensor, attended: Tensor) -> Tensor:
    """Return results from attended latents: [tokens, heads, rank] to [tokens, heads, value dim]."""
    return torch.bmm(attended.transpose(0, 1), values).transpose(0, 1)
