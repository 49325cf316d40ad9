"""Calls a model with steps over a paged cache: one call for the chunks of many sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import FIRST, Capacity, StepSize, WarmUp
from duoka.forecast.workload import LATENT_PAGE_TOKENS
from duoka.models.adapter_stacks import ranks_of
from duoka.models.kv_cache import new_cache
from duoka.models.quantization import computing_devices
from duoka.report.measured import Fallback

from ..devices import peak_bytes
from ..draw import draw_in_every_way
from ..lost_gpu import find_lost_gpu
from . import paged_attention
from .chunk import Chunk
from .latents import expand_again, keep_latents
from .paged_cache import PagedCache
from .paged_step import PagedStep, fill
from .step_graphs import Recorded, StepGraph, StepGraphs, refuse_difference
from .try_attention import reason_to_gather

_SERVED = frozenset({"full_attention", "sliding_attention"})


class PagedModel:
    """Calls a model with steps over a paged cache; a step can be recomputed.

    Parameters
    ----------
    model : PreTrainedModel
        A model that `reads_pages`: on one device, dispatched over several, or one stage's part.
    capacity : Capacity
    device : torch.device, optional
        The device on which inputs are made: that of the model's first module, by default the
        model's own.
    is_known : bool
        True if `start` has succeeded for the same model elsewhere.
    is_spread : bool, optional
        True if the model's blocks may be on several devices; by default, if its parameters are.
    runs_ahead : bool
        True if steps may have tokens that the step before samples (see `Chunk`), each given to
        `keep_sampled`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: Capacity,
        device: torch.device | None = None,
        *,
        is_known: bool = False,
        is_spread: bool | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self.model: Any = model
        self.device: torch.device = model.device if device is None else device
        self._attention_before = model.config._attn_implementation
        windows = _windows_of(model)
        devices = computing_devices(model) - {torch.device("meta")}
        self._reasons_to_gather: dict[torch.device, str] = {}
        if capacity.has_block_tables:
            head_dim = _head_dim(model)
            reasons = {device: reason_to_gather(device, head_dim) for device in devices}
            self._reasons_to_gather = reasons
            capacity = replace(capacity, gathers=any(reasons.values()))
        self.cache = PagedCache(capacity, {0, *windows})
        self._ranks = ranks_of(model)
        self.cache.rank_owners = self._ranks.owners
        self.graphs = StepGraphs(self.device)
        self.runs_ahead = runs_ahead
        self._sampled: Tensor | None = None  # of the latest step, by its rows of logits
        if runs_ahead:
            rows = capacity.logits(capacity.sequences)
            self._sampled = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._is_spread = len(devices) > 1 if is_spread is None else is_spread
        paged_attention.register()
        if capacity.page_tokens == LATENT_PAGE_TOKENS:
            keep_latents(model)
        model.set_attn_implementation(paged_attention.NAME)
        if is_known:
            self._omit_masks(dict(enumerate(windows)))

    @property
    def fallbacks(self) -> list[Fallback]:
        """The features that aren't used, as far as known."""
        reasons = self._reasons_to_gather.items()
        gathering = [Fallback(str(device), "attention", why) for device, why in reasons if why]
        fault = self.graphs.fault
        return [*gathering, *([Fallback(str(self.device), "graphs", fault)] if fault else [])]

    def close(self) -> None:
        """Restore the model's own attention, and free the cache."""
        self.model.set_attn_implementation(self._attention_before)
        expand_again(self.model)
        self.graphs.clear()
        del self.cache

    @torch.no_grad()
    def start(self) -> None:
        """Run a first step, which allocates the pages.

        Raises
        ------
        ModelError
            If a layer's attention isn't causal, a layer calls attention more than once, or a module
            with stacked adapters isn't called.
        """
        step = self.step(size=FIRST)
        logits = self.call(step, self.device)()
        for number, window in enumerate(_windows_of(self.model)):
            if step.windows.get(number, window) != window:
                raise ModelError(f"layer {number} has a sliding window that its attention ignores")
        self._ranks.refuse_uncalled()
        self._omit_masks(step.windows)
        draw_in_every_way(logits)

    # The first step lets transformers make its masks, to learn that they are causal, and the window
    # of each layer. Making masks takes some launches, a copy to each device, and a read of the
    # positions on the device, for which the host waits; later steps go without.
    def _omit_masks(self, windows: dict[int, int]) -> None:
        """Let transformers make no masks from now on; `windows` are the windows of the layers."""
        self.cache.layer_windows = windows
        self.model.set_attn_implementation(paged_attention.NAME_WITHOUT_MASKS)

    def warm_up(self, warm_up: WarmUp = "every") -> None:
        """Run a first step and steps of other sizes, so that out-of-memory errors come now."""
        self.start()
        for size in self.cache.capacity.warm_up_steps(warm_up, self._reserved_bytes):
            self.try_out(size)
        self._record_graphs()

    def _record_graphs(self) -> None:
        """Record the decode steps of all sizes as CUDA graphs, and compare each with its kernels.

        After an error, or if results differ, steps go on as they do without graphs.
        """
        if not self.graphs.is_usable or self._is_spread:
            return
        with self.graphs.trying():
            for size in self.cache.capacity.graph_steps():
                refuse_difference(*self.record_graph(size))

    @torch.no_grad()
    def record_graph(self, size: StepSize) -> tuple[list[Tensor], list[Tensor]]:
        """Record a decode step as a CUDA graph; return the graph's outputs and its kernels'.

        Both are of a step with other tokens than the recorded one.
        """
        step = self.step(size=size, is_decoding=True)
        expected = self.call(step, self.device)()
        self.graphs.record(size.tokens, partial(self._record, size))
        return [self.call(step, self.device)()], [expected]

    def _record(self, size: StepSize) -> Recorded:
        """Run a decode step for a graph; return its table and its logits."""
        run, table = self.call_for_graph(size)
        return [table], [run().contiguous()]

    def call_for_graph(self, size: StepSize) -> tuple[Callable[[], Tensor], Tensor]:
        """Return a function that calls the model with a decode step, and the step's empty table."""
        step = PagedStep.of_decoding(size, self.cache, 0)
        table = step.new_table(self.device, len(step.numbers()))
        inputs = step.arguments(table)
        self._insert_sampled(inputs["input_ids"])
        return self._bind(step, inputs), table

    def try_out(self, size: StepSize) -> None:
        """Run a step of a given size, and every path of sampling on its logits."""
        draw_in_every_way(self.run(size=size))

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        size: StepSize | None = None,
        *,
        is_decoding: bool = False,
    ) -> PagedStep:
        """Make a step of chunks; if a size is given, of padding alone or of decoding sequences."""
        if size is None:
            return PagedStep(chunks, self.cache)
        if is_decoding:
            return PagedStep.of_decoding(size, self.cache, 1)
        return PagedStep.of_size(size, self.cache)

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk] = (), size: StepSize | None = None) -> Tensor:
        """Run a step on a model that is wholly in this process; return logits as `call` does."""
        return self.call(self.step(chunks, size), self.device)()

    def call(self, step: PagedStep, device: torch.device) -> Callable[[], Tensor]:
        """Make a step's inputs on a device; return a function that calls the model with them.

        The function returns the logits of `step.last_rows`, [rows, vocabulary]: of the chunks with
        a `row`, in the caller's order, then padding.
        """
        if step.is_decoding and (graph := self.graphs.get(step.num_tokens)):
            return partial(_replay, graph, step)
        inputs = step.inputs(device)
        if step.takes_sampled:
            self._insert_sampled(inputs["input_ids"])
        return self._bind(step, inputs)

    def keep_sampled(self, tokens: Tensor) -> None:
        """Keep the tokens sampled for the rows of the latest step, [rows], for the next step."""
        if self._sampled is not None:
            self._sampled[: len(tokens)].copy_(tokens)

    def _insert_sampled(self, tokens: Tensor) -> None:
        """Replace each token -1 - r by the kept token of row r, without knowing it on the host."""
        if self._sampled is not None:
            rows = tokens.bitwise_not().clamp_(min=0)  # ~(-1 - r) is r
            tokens.copy_(torch.where(tokens < 0, self._sampled[rows], tokens))

    def _bind(self, step: PagedStep, inputs: dict[str, Any]) -> Callable[[], Tensor]:
        """Return a function that calls the model with the arguments of a step; see `call`."""
        on_device = inputs.pop("logits_to_keep")
        # On several devices the hidden states needn't be on the device of the inputs.
        rows = step.last_rows if self._is_spread else on_device
        if self._takes_rows:
            inputs["logits_to_keep"] = rows

        def run() -> Tensor:
            logits: Tensor = self.model(**inputs).logits
            return logits[0] if self._takes_rows else logits[0, rows]

        return run

    def _reserved_bytes(self) -> int:
        """Return the sum of the peak reserved bytes of the model's devices."""
        peaks = map(peak_bytes, {parameter.device for parameter in self.model.parameters()})
        return sum(peak.reserved_bytes for peak in peaks if peak is not None)


@contextmanager
def reading_pages(model: PreTrainedModel) -> Iterator[None]:
    """Turn any error in the scope into ModelError: the model doesn't support a paged cache.

    Model code may fail since it gets no mask. Out-of-memory errors and lost GPUs are raised as is.
    """
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever that code raises
        if find_lost_gpu(error):
            raise
        raise ModelError(f"{type(model).__name__} doesn't support a paged KV cache") from error


def reads_pages(model: PreTrainedModel) -> bool:
    """Return True if a model's layers can read their keys and values from pages.

    All layers must have keys and values of their own, with full or sliding-window attention, called
    through transformers' `AttentionInterface`.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and not model.config.is_encoder_decoder
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "num_kv_shared_layers", 0)
        and set(getattr(config, "layer_types", None) or ()) <= _SERVED
    )


def _replay(graph: StepGraph, step: PagedStep) -> Tensor:
    """Replay a recorded step with the table of another step; return the logits."""
    (table,), (logits,) = graph.inputs, graph.outputs
    fill(table, step.numbers())
    graph.replay()
    return logits


def _head_dim(model: PreTrainedModel) -> int:
    """Return the head size of a model's attention."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def _windows_of(model: PreTrainedModel) -> list[int]:
    """Return the sliding window of each layer's own cache in tokens; 0 for layers without."""
    layers = getattr(new_cache(model), "layers", [])
    return [layer.sliding_window if layer.is_sliding else 0 for layer in layers]
