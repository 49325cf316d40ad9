"""The executor of one process: a model that is spread over its devices, called as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.models.kv_cache import new_cache

from . import paged_attention
from .paged_attention import PagedCache, PagedStep
from .step import Chunk

_SERVED = frozenset({"full_attention", "sliding_attention"})


class InlineExecutor:
    """Runs steps of a model with a paged cache; a step can be run again.

    Parameters
    ----------
    model : PreTrainedModel
        One that `reads_pages`, on one device or dispatched over several.
    num_pages, page_tokens : int
        Of the cache.

    Raises
    ------
    ModelError
        If the model's code does more than causal attention, once in each layer.
    """

    is_paged = True

    def __init__(self, model: PreTrainedModel, num_pages: int, page_tokens: int) -> None:
        self._model: Any = model
        self._cache = PagedCache(num_pages, page_tokens)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._before = model.config._attn_implementation
        paged_attention.register()
        self._model.set_attn_implementation(paged_attention.NAME)
        try:
            # The pages are made; and what the model's code asks of attention is known.
            chunk = Chunk(-1, [0], 0, [self._cache.scratch_page], wants_logits=True)
            step = PagedStep([chunk], self._cache)
            self._forward(step)
            _refuse_other_windows(model, step.windows)
        except Exception as error:  # whatever code raises that reads the mask, which is none
            self.close()
            if isinstance(error, (ModelError, torch.OutOfMemoryError)):
                raise
            raise ModelError(f"{type(model).__name__} can't read from pages") from error

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run a step; the logits after the chunks that want them, [chunks, vocabulary]."""
        return self._forward(PagedStep(chunks, self._cache))

    @torch.inference_mode()
    def _forward(self, step: PagedStep) -> Tensor:
        chunks, device = step.chunks, self._model.device
        ids = [token for chunk in chunks for token in chunk.tokens]
        places = [place for chunk in chunks for place in chunk.places]
        ends = zip(step.offsets[1:], chunks, strict=True)
        last_rows = [end - 1 for end, chunk in ends if chunk.wants_logits]
        rows = torch.tensor(last_rows, dtype=torch.long)
        choice = {"logits_to_keep": rows} if self._keeps else {}
        logits: Tensor = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([places], device=device),
            use_cache=False,
            step=step,
            **choice,
        ).logits
        return logits[0] if self._keeps else logits[0, rows]

    def forget(self, sequence: int) -> None:
        """A sequence has ended; its pages are others' now."""

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


def _refuse_other_windows(model: PreTrainedModel, windows: Mapping[int, int]) -> None:
    """Raise ModelError where a layer's own cache would forget tokens that it sees here."""
    layers = getattr(new_cache(model), "layers", [])
    for number, layer in enumerate(layers):
        window = layer.sliding_window if layer.is_sliding else 0
        if windows.get(number, window) != window:
            raise ModelError(f"layer {number} has a window that its attention doesn't know")
