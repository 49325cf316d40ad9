"""Several samples in a row of tokens, and which models keep them apart.

transformers tells packed samples from one another where no attention mask is passed, no cache is
used, and the position ids begin again; but only where a model's code hands those to its masks, and
nothing but attention reaches back. Which do so is known from computing: a test packs samples in
every family that transformers has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from duoka.errors import UsageError

FAMILIES: frozenset[str] = frozenset({
    "apertus", "arcee", "aria_text", "bitnet", "chatglm", "codegen", "cohere", "cohere2",
    "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3",
    "jais2", "llama", "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral",
    "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip
"""Their attention, and nothing else, reaches back, and not into the sample before."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def refuse_packing(config: PretrainedConfig) -> None:
    """Raise UsageError unless a test has shown that a model keeps packed samples apart."""
    kinds = getattr(config, "layer_types", None) or ()
    if config.model_type not in FAMILIES or not set(kinds) <= set(_ATTENTION):
        raise UsageError(
            f"{config.model_type} isn't known to separate packed samples: tokens would attend to "
            "other samples",
            hint="train without --packing",
        )


def pack(lengths: npt.NDArray[np.int64], order: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Pack samples into rows by best fit decreasing.

    It needs at most 11/9 of the minimal number of rows (Johnson, 1974). Samples of equal length
    keep the order of `order`.
    """
    # Longest first, each into the pack with the least space that is left for it. Samples of 7, 5,
    # 5, 4, 3, 3, 3 tokens in rows of 10: [7], [5, 5], [4]; then 3 fills [7, 3], and the others go
    # to [4, 3, 3]. A pack is found by bisection in the sorted spaces that are left anywhere.
    packs: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # how much is left → of which packs
    spaces: list[int] = []  # the keys, in order
    for sample in sorted(order, key=lambda sample: -lengths[sample]):
        length = int(lengths[sample])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space, index = most_tokens, len(packs)
            packs.append([])
        else:
            space = spaces[at]
            index = by_space[space].pop()
            if not by_space[space]:
                del spaces[at]
        packs[index].append(sample)
        space_left = space - length
        if not by_space.setdefault(space_left, []):
            insort(spaces, space_left)
        by_space[space_left].append(index)
    return packs
