"""Pack several samples into a row of tokens, for models that keep the samples separate.

transformers separates packed samples if no attention mask is passed, no cache is used, and the
position ids restart at 0 with each sample. But this works only for models that pass position ids on
to their masks, and in which only attention mixes tokens. A test packs samples in every family of
transformers to find these models.
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
"""Model types that keep packed samples separate: no token depends on an earlier sample."""
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def refuse_packing(config: PretrainedConfig) -> None:
    """Raise UsageError unless the model type is tested to keep packed samples separate."""
    kinds = getattr(config, "layer_types", None) or ()
    if config.model_type not in FAMILIES or not set(kinds) <= set(_ATTENTION):
        raise UsageError(
            f"{config.model_type} isn't known to separate packed samples: tokens would attend to "
            "other samples",
            hint="train without --packing",
        )


def pack(lengths: npt.NDArray[np.int64], order: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Pack samples into rows of at most `most_tokens` tokens by best fit decreasing.

    The number of rows is at most about 11/9 of the minimum (Johnson, 1974). Samples of equal length
    are taken in the order of `order`. Returns the samples of each row.
    """
    # Longest first, each sample goes into the row with the least free space that is enough. Samples
    # of 7, 5, 5, 4, 3, 3, 3 tokens in rows of 10: [7], [5, 5], [4]; then 3 fills [7, 3], and the
    # others go to [4, 3, 3]. The row is found by bisection in the sorted free spaces.
    packs: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free space → the rows with that space
    spaces: list[int] = []  # the keys of `by_space`, sorted
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
