"""Models whose layers can't read from pages: a cache of its own for each sequence.

State spaces, linear attention, encoders with a decoder, and code with an attention of its own:
these run as transformers' `generate` runs them, one sequence after another. Their steps are those
of the engine all the same, so that many requests are on their way at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.models.kv_cache import cache_name, new_cache

from .step import Chunk


class CachedModel:
    """Computes the logits of steps of any model that generates; see `PagedModel`.

    Nothing is computed twice: a chunk that has failed is lost, and its sequence with it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._cache_name = cache_name(model)
        # Of each sequence what `generate` carries from one call to the next.
        self._arguments: dict[int, dict[str, Any]] = {}
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted and not model.config.is_encoder_decoder
        settings = model.generation_config
        self._start_token = settings.decoder_start_token_id
        if self._start_token is None:
            self._start_token = settings.bos_token_id

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run a step; the logits after the chunks, [chunks, vocabulary]."""
        return torch.cat([self._run(chunk) for chunk in chunks])

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._arguments.pop(sequence, None)

    @property
    def keeps_state_in_modules(self) -> bool:
        """Whether the model has room for one sequence alone, in its modules."""
        return new_cache(self._model) is None

    def close(self) -> None:
        """Let go of all caches."""
        self._arguments.clear()

    def _run(self, chunk: Chunk) -> Tensor:
        model, is_first = self._model, not chunk.start
        ids = torch.tensor([chunk.tokens], device=model.device)
        arguments = self._begin(ids) if is_first else self._arguments[chunk.sequence]
        if model.config.is_encoder_decoder and is_first:
            ids = ids.new_tensor([[self._start_token]])
        # `generate` hands all tokens so far to the model, which takes the last ones of them.
        arguments["ids"] = ids = (
            torch.cat([arguments.pop("ids"), ids], dim=1) if not is_first else ids
        )
        carried = {name: value for name, value in arguments.items() if name != "ids"}
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=None if is_first else len(chunk.tokens),
            is_first_iteration=is_first,
            **carried,
        )
        outputs = model(**inputs, return_dict=True)
        carried = model._update_model_kwargs_for_generation(
            outputs, carried, is_encoder_decoder=model.config.is_encoder_decoder
        )
        self._arguments[chunk.sequence] = {**carried, "ids": ids}
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _begin(self, ids: Tensor) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "use_cache": True,
        }
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        cache = new_cache(self._model)
        if cache is not None:
            arguments[self._cache_name] = cache
        if self._model.config.is_encoder_decoder:
            arguments["encoder_outputs"] = self._model.get_encoder()(
                input_ids=ids, attention_mask=arguments["attention_mask"], return_dict=True
            )
        return arguments
