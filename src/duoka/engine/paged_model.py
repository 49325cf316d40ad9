"""A model whose layers keep keys and values in pages, called with the packed tokens of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.models.kv_cache import new_cache
from duoka.planner.placement import Placement
from duoka.stages.route import Routes, find_route

from . import paged_attention
from .paged_attention import PagedCache, PagedStep
from .request import SamplingParams
from .sampler import Row
from .step import Chunk

_GREEDY_ROW = Row(params=SamplingParams(), seed=0, place=0)
_SERVED = frozenset({"full_attention", "sliding_attention"})
# The steps of which routes are found: tokens, and rows of logits. Each of the two is larger once.
_SIZES = (9, 2), (13, 2), (9, 5)


class PagedModel:
    """Computes the logits of steps; a step can be computed again.

    Parameters
    ----------
    model : PreTrainedModel
        One that `reads_pages`, on one device, dispatched over several, or a part of one.
    num_pages, page_tokens : int
        Of the cache.
    """

    def __init__(self, model: PreTrainedModel, num_pages: int, page_tokens: int) -> None:
        self._model: Any = model
        self._cache = PagedCache(num_pages, page_tokens)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._before = model.config._attn_implementation
        paged_attention.register()
        self._model.set_attn_implementation(paged_attention.NAME)

    def step(self, chunks: Sequence[Chunk]) -> PagedStep:
        """Chunks as `call` takes them."""
        return PagedStep(chunks, self._cache)

    def call(self, step: PagedStep, device: torch.device) -> Callable[[], Tensor]:
        """What calls the model with inputs on a device.

        It returns the logits after the chunks that have a row, [rows, vocabulary].
        """
        ids = [token for chunk in step.chunks for token in chunk.tokens]
        places = [place for chunk in step.chunks for place in chunk.places]
        ends = zip(step.offsets[1:], step.chunks, strict=True)
        last = [end - 1 for end, chunk in ends if chunk.row is not None]
        rows = torch.tensor(last, dtype=torch.long)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([places], device=device),
            "use_cache": False,
            "step": step,
        }
        if self._keeps:
            inputs["logits_to_keep"] = rows

        def run() -> Tensor:
            logits: Tensor = self._model(**inputs).logits
            return logits[0] if self._keeps else logits[0, rows]

        return run

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a step where all of the model is in this process."""
        return self.call(self.step(chunks), self._model.device)()

    def try_out(self) -> None:
        """Compute a token, for which all pages are made.

        Raises
        ------
        ModelError
            If the model's code does more than causal attention, once in each layer.
        """
        step = self.step([Chunk(-1, [0], 0, [self._cache.scratch_page], _GREEDY_ROW)])
        try:
            with torch.inference_mode():
                self.call(step, self._model.device)()
            refuse_other_windows(self._model, step.windows)
        except Exception as error:  # whatever code raises that reads the mask, which is none
            self.close()
            if isinstance(error, (ModelError, torch.OutOfMemoryError)):
                raise
            raise ModelError(f"{type(self._model).__name__} can't read from pages") from error

    def close(self) -> None:
        """Give the model back as it was; the cache is gone."""
        self._model.set_attn_implementation(self._before)
        del self._cache


def reads_pages(model: PreTrainedModel) -> bool:
    """Whether all layers keep keys and values, and call attention by transformers' interface."""
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and not model.config.is_encoder_decoder
        and not getattr(model, "_is_stateful", False)
        and not getattr(config, "num_kv_shared_layers", 0)
        and set(getattr(config, "layer_types", None) or ()) <= _SERVED
    )


def find_routes(model: PreTrainedModel, placement: Placement) -> Routes:
    """What crosses between the stages of a placement in steps of (tokens, rows).

    Nothing is computed, and the model needs no data.

    Raises
    ------
    ModelError
        If the model can't read from pages, or can't run in stages.
    """

    def run(tokens: int, rows: int, copied: Any, device: torch.device) -> None:
        sizes = [tokens - rows + 1, *[1] * (rows - 1)]
        chunks = [Chunk(i, [0] * size, 0, [i], _GREEDY_ROW) for i, size in enumerate(sizes)]
        paged = PagedModel(copied, rows, tokens)
        step = paged.step(chunks)
        with torch.no_grad():
            paged.call(step, device)()
        refuse_other_windows(model, step.windows)

    try:
        return Routes(
            {sizes: find_route(model, placement, partial(run, *sizes)) for sizes in _SIZES}
        )
    except ModelError:
        raise
    except Exception as error:  # as above
        raise ModelError(f"{type(model).__name__} can't read from pages") from error


def refuse_other_windows(model: PreTrainedModel, windows: Mapping[int, int]) -> None:
    """Raise ModelError where a layer's own cache would forget tokens that it sees here."""
    layers = getattr(new_cache(model), "layers", [])
    for number, layer in enumerate(layers):
        window = layer.sliding_window if layer.is_sliding else 0
        if windows.get(number, window) != window:
            raise ModelError(f"layer {number} has a window that its attention doesn't know")
