"""Pages of latents: the logits and the tokens of models whose keys and values are expanded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from matrix.engine import at_once, one_by_one
from matrix.paged import ROW

from duoka.checkpoint.architecture import caches_latents
from duoka.forecast.serving import Capacity
from duoka.forecast.workload import LATENT_PAGE_TOKENS
from duoka.models.quantization.weights import let_compute_in, quantize
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.latents import keeps_latents
from duoka.runtime.call.paged_model import PagedModel

NAMES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
CAPACITY = Capacity(
    sequences=9, context_tokens=130, pages=45, page_tokens=LATENT_PAGE_TOKENS, step_tokens=100,
    graph_tokens=256,
)  # fmt: skip
LONGER = {"max_position_embeddings": 256}


def steps_of(rng: random.Random) -> list[list[Chunk]]:
    """Prefill chunks of nine sequences, then steps in which each has a token or none."""
    lengths = [0] * 9
    steps = []
    for number in range(12):
        chunks, left = [], CAPACITY.step_tokens
        for sequence in range(9) if number < 4 else sorted(rng.sample(range(9), 9 - number % 3)):
            size = min(left, rng.choice([1, 5, 30])) if number < 4 else 1
            if size:
                tokens = [rng.randrange(3, families.VOCABULARY) for _ in range(size)]
                pages = range(5 * sequence, 5 * sequence + 5)
                row = ROW if number >= 4 else rng.choice([ROW, None])
                chunks.append(Chunk(sequence, tokens, lengths[sequence], pages, row))
                lengths[sequence] += size
                left -= size
        steps.append(chunks)
    return steps


def logits_of(model: Any, steps: list[list[Chunk]], page_tokens: int) -> list[torch.Tensor]:
    """Return the logits of steps over pages of a given size."""
    scale = LATENT_PAGE_TOKENS // page_tokens
    paged = PagedModel(model, replace(CAPACITY, page_tokens=page_tokens, pages=scale * 45))
    paged.start()
    logits = []
    for chunks in steps:
        pages = [range(scale * chunk.pages[0], scale * (chunk.pages[-1] + 1)) for chunk in chunks]
        logits.append(paged.run(list(map(_with_pages, chunks, pages))))
    paged.close()
    return logits


def _with_pages(chunk: Chunk, pages: range) -> Chunk:
    return replace(chunk, pages=pages)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_expanded_keys_and_values(name: str) -> None:
    model: Any = families.build(name, sizes=LONGER)
    steps = steps_of(random.Random(name))
    assert caches_latents(model.config.to_dict())
    expected, computed = (logits_of(model, steps, size) for size in (16, LATENT_PAGE_TOKENS))
    for right, result in zip(expected, computed, strict=True):
        torch.testing.assert_close(result, right)


def test_quantized_expansions_are_unpacked_once() -> None:
    """As of a checkpoint that was published quantized."""
    model: Any = families.build("deepseek_v3", sizes=LONGER | {"kv_lora_rank": 64})
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            weight = quantize(module.kv_b_proj.weight.detach(), "int8")
            let_compute_in(weight, torch.float32)
            module.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    steps = steps_of(random.Random(1))
    expected, computed = (logits_of(model, steps, size) for size in (16, LATENT_PAGE_TOKENS))
    torch.testing.assert_close(torch.cat(computed), torch.cat(expected), rtol=1e-3, atol=1e-3)
    paged = PagedModel(model, CAPACITY)
    for _ in range(2):
        paged.start()
        unpacked = paged.cache.unpacked
        assert [weight.shape for weight in unpacked.values()] == [(48, 64)] * 2
        assert unpacked[0] is paged.cache.unpacked[0]
    paged.close()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("graph_tokens", [0, 256])
@pytest.mark.parametrize("pages", [45, 7])
def test_answers_are_those_of_generate(name: str, graph_tokens: int, pages: int) -> None:
    """Prompts are prefilled in chunks and begin alike; with few pages requests are preempted."""
    model: Any = families.build(name, sizes=LONGER)
    rng = random.Random(name)
    common = [rng.randrange(3, families.VOCABULARY) for _ in range(70)]
    texts = [[*common[:stop], *range(5, 5 + more)] for stop, more in (
        (0, 1), (70, 3), (70, 20), (40, 50), (64, 1), (70, 40), (30, 2),
    )]  # fmt: skip
    expected = [one_by_one(model, text) for text in texts]
    capacity = replace(
        CAPACITY, sequences=4, pages=pages, step_tokens=24, graph_tokens=graph_tokens
    )
    assert at_once(model, texts, capacity, rng) == (expected, True)
    assert not any(keeps_latents(module) for module in model.modules())
    assert [one_by_one(model, text) for text in texts] == expected


def test_a_page_holds_a_latent_and_a_rotary_part() -> None:
    model: Any = families.build("glm4_moe_lite")
    paged = PagedModel(model, CAPACITY)
    paged.start()
    (pages,) = paged.cache.layer(0)
    assert pages.states.shape == (46, LATENT_PAGE_TOKENS, 1, 8 + 4)
    paged.close()


@pytest.mark.parametrize("number", range(1, 10))
def test_a_decode_step_has_the_same_groups_at_any_positions(number: int) -> None:
    """So that it can be a CUDA graph."""
    model: Any = families.build("glm4_moe_lite")
    paged = PagedModel(model, CAPACITY)
    rng, layouts = random.Random(number), []
    for _ in range(4):
        at = [rng.randrange(100) for _ in range(number)]
        step = paged.step(
            [Chunk(n, [5], start, range(5 * n, 5 * n + 5), ROW) for n, start in enumerate(at)]
        )
        numbers = step.numbers()
        layouts.append((len(numbers), step.num_tokens, len(step.last_rows), step.groups(0)))
    assert all(layout == layouts[0] for layout in layouts)
    (size,) = [size for size in CAPACITY.graph_steps() if size.tokens == step.num_tokens]
    recorded = paged.step(size=size, is_decoding=True)
    assert (len(recorded.numbers()), recorded.groups(0)) == (layouts[0][0], layouts[0][3])
    paged.close()


@pytest.mark.parametrize(("context", "most"), [(130, 204), (8192, 4), (2**15, 1), (2**15 + 1, 0)])
def test_graphs_end_where_full_contexts_are_too_long(context: int, most: int) -> None:
    assert replace(CAPACITY, context_tokens=context).most_graph_tokens == most
    assert not replace(CAPACITY, page_tokens=16).most_graph_tokens
