"""The base of callers that call a model as transformers' `generate` does."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duoka.errors import UsageError
from duoka.forecast.workload import Cache
from duoka.models.cache_argument import cache_name
from duoka.models.kv_cache import new_cache


def refuse_without_generation(model: nn.Module) -> None:
    """Raise UsageError for a model that can't generate text: a classifier, an encoder."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        raise UsageError(
            f"{type(model).__name__} is not a text generation model, so its inputs are unknown",
            hint="give a model object with example inputs: duoka.plan(model, fleet, inputs=…)",
        )


class GenerateCaller:
    """Base of classes that call a model as `generate` does.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model, or an encoder with a decoder, on any devices.
    cache : Cache
    keeps_all_logits : bool
        Let the model return the logits of all tokens, not of the last token only.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache = "dynamic", *, keeps_all_logits: bool = False
    ) -> None:
        refuse_without_generation(model)
        self.model: Any = model
        self._cache_kind: Cache = cache
        self._cache_name = cache_name(model)
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._is_pair = bool(model.config.is_encoder_decoder)
        takes_number = "logits_to_keep" in self._accepted and not keeps_all_logits
        self._logits_to_keep = {"logits_to_keep": 1} if takes_number else {}

    def _new_cache(self) -> Any:
        """Make a cache for the model; None if the model makes its own."""
        return new_cache(self.model, self._cache_kind)

    def _prepare(
        self, ids: torch.Tensor, *, is_first_iteration: bool, **arguments: Any
    ) -> dict[str, Any]:
        """Let the model prepare the arguments of its `forward`."""
        inputs = self.model.prepare_inputs_for_generation(
            ids, is_first_iteration=is_first_iteration, **arguments
        )
        return {**inputs, "return_dict": True}
