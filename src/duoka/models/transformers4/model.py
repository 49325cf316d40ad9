"""Models with the base class of transformers 4."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..cache_argument import cache_in

_PREPARE = "prepare_inputs_for_generation"
_TAKEN_APART = re.compile(r"\w+\s*,\s*\w+\s*=\s*self\._extract_past_from_model_output")


class LegacyModel(PreTrainedModel, GenerationMixin):
    """The base class of 4.x: every model generates (until 4.50), and makes its own cache."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        inherit: Any = super().__init_subclass__  # without types there
        inherit(**kwargs)
        prepare = vars(cls).get(_PREPARE)
        if prepare is not None:
            setattr(cls, _PREPARE, _with_new_positions(prepare))

    @classmethod
    def can_generate(cls) -> bool:
        """Return True if the model has a head to generate with (until 4.50)."""
        return getattr(cls, _PREPARE) is not getattr(GenerationMixin, _PREPARE)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: in 4.x the first call had no cache, and later calls had its outputs."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; before 4.30 a streamer was the seventh argument."""
        if len(args) > 6 and isinstance(args[6], BaseStreamer):
            kwargs["streamer"] = args[6]
            args = args[:6]
        inherited: Any = super()  # whose type asks for another class
        return inherited.generate(*args, **kwargs)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *rest: Any, **named: Any
    ) -> Any:
        """Keep the mask for its length; 5.0 drops masks of ones."""
        if model_kwargs.get("attention_mask", input_ids) is None:
            model_kwargs["attention_mask"] = torch.ones_like(input_ids)
        prefill: Any = GenerationMixin._prefill
        return prefill(self, input_ids, generation_config, model_kwargs, *rest, **named)

    def _extract_past_from_model_output(
        self, outputs: Any, standardize_cache_format: bool = False
    ) -> Any:
        """Return the cache among outputs (until 4.49).

        From 4.42 on the result was a name and a cache: such callers unpack two values.
        """
        cache = cache_in(outputs)
        caller = inspect.getsource(type(self)._update_model_kwargs_for_generation)
        return ("past_key_values", cache) if _TAKEN_APART.search(caller) else cache

    def _get_logits_warper(self, generation_config: Any, **_: Any) -> LogitsProcessorList:
        """Return no warpers: since 4.45 they are processors."""
        return LogitsProcessorList()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied tensors. Until 5.0 a list named tensors that may be missing."""
        if all_submodels or isinstance(self._tied_weights_keys, dict):
            return dict(super().get_expanded_tied_weights_keys(all_submodels=all_submodels))
        head = self.get_output_embeddings() if self.config.tie_word_embeddings else None
        if head is None:
            return {}
        names = {module: name for name, module in self.named_modules()}
        return {f"{names[head]}.weight": f"{names[self.get_input_embeddings()]}.weight"}

    def get_output_embeddings(self) -> Any:
        """Return None unless overridden; 5.0 looks for an `lm_head`."""
        return None

    def get_head_mask(
        self, head_mask: Tensor | None, num_hidden_layers: int, is_attention_chunked: bool = False
    ) -> Any:
        """Return a mask for each layer (until 5.0)."""
        if head_mask is None:
            return [None] * num_hidden_layers
        layers = head_mask if head_mask.dim() == 2 else head_mask.expand(num_hidden_layers, -1)
        return layers[:, None, :, None, None].to(self.dtype)


def _with_new_positions(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Cut positions to the new tokens: 4.x passed no positions, and 5.0 passes all."""

    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if ids is not None and positions is not None:
            inputs["position_ids"] = positions[..., -ids.shape[1] :]
        return inputs

    return prepared


def finish_construction(model: nn.Module) -> None:
    """Call `post_init` of each part, which 5.0 needs at the end of its constructor."""
    for part in reversed(list(model.modules())):
        if isinstance(part, LegacyModel) and "all_tied_weights_keys" not in vars(part):
            prepare: Any = part.post_init  # without types there
            prepare()
