"""Steps over pages: attention gives what it gives over whole sequences, in sizes that are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.errors import ModelError
from duoka.forecast.serving import FIRST, Capacity
from duoka.forecast.workload import Workload
from duoka.models.cache_argument import CACHE
from duoka.models.kv_cache import Int8Layer
from duoka.runtime.call import paged_attention
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_attention import attend
from duoka.runtime.call.paged_cache import PagedCache
from duoka.runtime.call.paged_step import PagedStep

HEADS, KEY_HEADS, DIM = 4, 2, 8
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
CAPACITY = Capacity(sequences=6, context_tokens=700, pages=300, page_tokens=16, step_tokens=640)


@dataclass
class Story:
    """A sequence: its keys and values so far, and its pages."""

    keys: Tensor
    values: Tensor
    pages: list[int]
    done: int = 0


def stories(rng: random.Random, number: int) -> list[Story]:
    torch.manual_seed(rng.randrange(2**31))
    free = list(range(CAPACITY.pages))
    rng.shuffle(free)
    made = []
    for _ in range(number):
        length = rng.choice([3, 40, 41, 44, 300, 700])
        pages = [free.pop() for _ in range(-(-length // 16))]
        made.append(
            Story(torch.randn(KEY_HEADS, length, DIM), torch.randn(KEY_HEADS, length, DIM), pages)
        )
    return made


def dense(story: Story, query: Tensor, start: int, window: int, options: dict[str, Any]) -> Tensor:
    """Attention of one sequence's queries, [heads, queries, dim], by the book."""
    end = start + query.shape[1]
    keys, values = (
        part[:, :end].repeat_interleave(HEADS // KEY_HEADS, dim=0)
        for part in (story.keys, story.values)
    )
    scores = query @ keys.transpose(1, 2) * DIM**-0.5
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    places, seen = torch.arange(start, end)[:, None], torch.arange(end)
    hidden = seen > places
    if window:
        hidden |= seen <= places - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("s_aux")) is not None:
        column = sinks[:, None, None].expand(-1, len(places), 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1] @ values
    return scores.softmax(dim=-1) @ values


def rounded(story: Story) -> Story:
    """A sequence whose keys and values have been rounded as a cache of 8 bit rounds them."""
    parts = []
    for states in (story.keys, story.values):
        layer = Int8Layer()
        layer.update(states[None], states[None])
        # The second step attends to what the first one left.
        whole, _ = layer.update(states[None, :, :1], states[None, :, :1])
        parts.append(whole[0, :, :-1])
    return replace(story, keys=parts[0], values=parts[1])


def chunks_of(rng: random.Random, told: list[Story]) -> list[Chunk]:
    """Some of each story that is to be told, as much as a step takes."""
    left, chunks = CAPACITY.step_tokens - len(told), []
    for number, story in enumerate(told):
        length = story.keys.shape[1]
        if story.done == length:
            story.done -= 1  # its last token once more
        rest = length - story.done
        size = 1 if rest == 1 else min(1 + left, rest, rng.choice([1, 2, 30, 400]))
        left -= size - 1
        wants = rng.random() < 0.7
        chunks.append(Chunk(number, [0] * size, story.done, story.pages, ROW if wants else None))
    return chunks


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 20}, {"softcap": 0.7}, {"s_aux": torch.randn(HEADS)}],
    ids=["full", "window", "softcap", "sinks"],
)
@pytest.mark.parametrize("form", ["whole", "int8", "block tables"])
@pytest.mark.parametrize("seed", range(3))
def test_attention_over_pages_is_that_over_whole_sequences(
    options: dict[str, Any], seed: int, form: str
) -> None:
    is_int8, has_tables = form == "int8", form == "block tables"
    if has_tables and options.keys() - {"sliding_window"}:
        pytest.skip("not in FlashAttention")
    rng = random.Random(seed)
    told = stories(rng, 6)
    window = options.get("sliding_window", 0)
    size = 256 if has_tables else CAPACITY.page_tokens
    cache = PagedCache(replace(CAPACITY, is_int8=is_int8, page_tokens=size), {0, window})
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    for _ in range(6):
        chunks = chunks_of(rng, told)
        step = PagedStep(chunks, cache)
        table = step.inputs(torch.device("cpu"))["step_table"]
        # Tokens in the step's own order; those that pad it are anything.
        order = [chunk.sequence for chunk in step.chunks]
        query = torch.randn(1, HEADS, step.num_tokens, DIM)
        key, value = (torch.randn(1, KEY_HEADS, step.num_tokens, DIM) for _ in range(2))
        for at, number in enumerate(order):
            chunk, story = chunks[number], told[number]
            rows = slice(int(step.offsets[at]), int(step.offsets[at + 1]))
            key[0, :, rows] = story.keys[:, chunk.start : chunk.end]
            value[0, :, rows] = story.values[:, chunk.start : chunk.end]
        found, _ = attend(module, query, key, value, None, step=step, step_table=table, **options)
        for at, number in enumerate(order):
            rows = slice(int(step.offsets[at]), int(step.offsets[at + 1]))
            chunk = chunks[number]
            story = rounded(told[number]) if is_int8 else told[number]
            expected = dense(story, query[0, :, rows], chunk.start, window, options)
            torch.testing.assert_close(
                found[0, rows].transpose(0, 1), expected, rtol=1e-4, atol=1e-5
            )
            told[number].done = chunk.end


def test_rows_of_padding_have_a_sequence_of_their_own() -> None:
    """All rows are computed: FlashAttention leaves others as they were in memory."""
    cache = PagedCache(replace(CAPACITY, page_tokens=256))
    rng = random.Random(3)
    for _ in range(40):
        chunks = chunks_of(rng, stories(rng, rng.randint(1, 6)))
        step = PagedStep(chunks, cache)
        table = step.inputs(torch.device("cpu"))["step_table"]
        offsets, used, tables = step.block_tables(table)
        queries = offsets.diff()
        assert offsets[-1] == step.num_tokens
        assert queries.max() == step.max_queries
        assert (queries <= used).all()  # else a query of the kernel has no keys
        padding = step.num_tokens - sum(len(chunk.tokens) for chunk in chunks)
        assert used[len(chunks) :].tolist() == [padding, *[0] * (6 - len(chunks))]
        assert (tables[len(chunks) :] == cache.scratch_page).all()


@pytest.mark.parametrize(
    ("batch", "context", "chunk"), [(1, 200, 2048), (4, 256, 2048), (9, 3, 512)]
)
def test_padding_alone_has_block_tables_at_every_size(batch: int, context: int, chunk: int) -> None:
    """Also where a prefill chunk is longer than a context."""
    work = Workload(
        cache="paged", batch=batch, prompt_tokens=context - 1, new_tokens=1, pages=9,
        prefill_chunk_tokens=chunk, page_tokens=256,
    )  # fmt: skip
    capacity = Capacity.of(work)
    for size in capacity.steps():
        step = PagedStep.of_size(size, PagedCache(capacity))
        offsets, used, _ = step.block_tables(step.inputs(torch.device("cpu"))["step_table"])
        assert offsets[-1] == size.tokens
        assert (offsets.diff() <= used).all()


@pytest.mark.parametrize("option", [{"softcap": 0.7}, {"s_aux": torch.zeros(HEADS)}])
def test_what_flash_attention_lacks_is_refused_with_block_tables(option: dict[str, Any]) -> None:
    step = PagedStep.of_size(FIRST, PagedCache(replace(CAPACITY, page_tokens=256)))
    table = step.inputs(torch.device("cpu"))["step_table"]
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    query, key = (torch.randn(1, heads, step.num_tokens, DIM) for heads in (HEADS, KEY_HEADS))
    with pytest.raises(ModelError, match="can't read pages by block tables"):
        attend(module, query, key, key, None, step=step, step_table=table, **option)


def test_every_step_is_of_a_known_size() -> None:
    rng = random.Random(5)
    cache = PagedCache(CAPACITY, (0, 20))
    sizes = CAPACITY.steps()
    for _ in range(40):
        told = stories(rng, rng.randint(1, 6))
        for story in told:
            story.done = rng.randrange(story.keys.shape[1])
        chunks = chunks_of(rng, told)
        step = PagedStep(chunks, cache)
        step.inputs(torch.device("cpu"))
        alike = [size for size in sizes if size.tokens == step.num_tokens]
        assert len(step.last_rows) in {size.logits for size in alike}
        rows = {piece.rows for w in (0, 20) for g in step.groups(w) for piece in g.tiles}
        assert rows <= {size.rows for size in alike}
        for window in (0, 20):
            for group in step.groups(window):
                assert group.sequences * group.pages <= CAPACITY.gathered_pages
        ends = [int(step.offsets[at + 1]) - 1 for at in range(len(chunks))]
        wanted = {chunk.sequence for chunk in chunks if chunk.row is not None}
        named = [
            ends[[c.sequence for c in step.chunks].index(c.sequence)]
            for c in chunks
            if c.sequence in wanted
        ]
        assert step.last_rows[: len(named)] == named


def attended(**options: Any) -> Tensor:
    """What attention gives in the first step, with options of a model."""
    torch.manual_seed(0)
    step = PagedStep.of_size(FIRST, PagedCache(CAPACITY))
    table = step.inputs(torch.device("cpu"))["step_table"]
    query = torch.randn(1, HEADS, step.num_tokens, DIM)
    key, value = (torch.randn(1, KEY_HEADS, step.num_tokens, DIM) for _ in range(2))
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    return attend(module, query, key, value, None, step=step, step_table=table, **options)[0]


@pytest.mark.parametrize(
    "options",
    [{"position_bias": torch.zeros(1)}, {"sinks": torch.zeros(HEADS)}, {"block_indices": [0]},
     {"indices": torch.zeros(1)}, {"dropout": 0.1}, {"is_causal": False},
     {"cu_seq_lens_q": torch.zeros(2)}, {"a_later_version": 1}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_an_argument_that_is_not_known_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"unknown '{next(iter(options))}'|is not causal"):
        attended(**options)


def test_what_changes_nothing_is_taken() -> None:
    usual = {
        "position_ids": torch.zeros(1, 1), "dropout": 0.0, "use_cache": False, "is_causal": True,
        "position_bias": None, "output_attentions": False, "output_router_logits": True,
    }  # fmt: skip
    assert torch.equal(attended(**usual), attended())


def masked(make: Any = create_causal_mask, **options: Any) -> Any:
    """What a model of transformers gets for a mask that it asks for."""
    paged_attention.register()
    config = LlamaConfig(attn_implementation=paged_attention.NAME, sliding_window=5)
    given = {"attention_mask": None, CACHE: None, **options}
    return make(config=config, inputs_embeds=torch.zeros(1, 4, 8), **given)


@pytest.mark.parametrize(
    "options",
    [{"or_mask_function": lambda batch, head, query, key: query == 1},
     {"and_mask_function": lambda batch, head, query, key: key > 0},
     {"block_sequence_ids": torch.tensor([[-1, 0, 0, -1]])},
     {"attention_mask": torch.tensor([[0, 1, 1, 1]])}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_a_mask_that_is_more_than_causal_is_refused(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="more than causal"):
        masked(make, **options)


def test_a_causal_mask_is_its_window_alone() -> None:
    positions = torch.tensor([[0, 1, 0, 1]])  # of two sequences
    for options in ({}, {"position_ids": positions}):
        assert masked(**options).shape == (0, 0)
        assert masked(create_sliding_window_causal_mask, **options).shape == (5, 0)
