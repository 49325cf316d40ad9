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
_UNPACKING_CALLER = re.compile(r"\w+\s*,\s*\w+\s*=\s*self\._extract_past_from_model_output")


class LegacyModel(PreTrainedModel, GenerationMixin):
    """The base class of 4.x: every model has `generate` (until 4.50), and creates its own cache."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        inherit: Any = super().__init_subclass__  # not annotated there
        inherit(**kwargs)
        prepare = vars(cls).get(_PREPARE)
        if prepare is not None:
            setattr(cls, _PREPARE, _cut_positions(prepare))

    @classmethod
    def can_generate(cls) -> bool:
        """Return True if the class defines `prepare_inputs_for_generation`: the rule until 4.50."""
        return getattr(cls, _PREPARE) is not getattr(GenerationMixin, _PREPARE)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: in 4.x the first call gets no cache, and later calls the returned cache."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; before 4.30 a streamer was the seventh argument."""
        if len(args) > 6 and isinstance(args[6], BaseStreamer):
            kwargs["streamer"] = args[6]
            args = args[:6]
        inherited: Any = super()  # its annotated `self` is another class
        return inherited.generate(*args, **kwargs)

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any
    ) -> Any:
        """Restore the attention mask, whose length legacy code reads; 5.0 drops masks of ones."""
        if model_kwargs.get("attention_mask", input_ids) is None:
            model_kwargs["attention_mask"] = torch.ones_like(input_ids)
        prefill: Any = GenerationMixin._prefill
        return prefill(self, input_ids, generation_config, model_kwargs, *args, **kw)

    def _extract_past_from_model_output(
        self, outputs: Any, standardize_cache_format: bool = False
    ) -> Any:
        """Return the cache among a model's outputs; removed in 4.50.

        From 4.42 on the method returned a name and the cache. It does so here if the caller's
        source unpacks two values.
        """
        cache = cache_in(outputs)
        caller = inspect.getsource(type(self)._update_model_kwargs_for_generation)
        return ("past_key_values", cache) if _UNPACKING_CALLER.search(caller) else cache

    def _get_logits_warper(self, generation_config: Any, **_: Any) -> LogitsProcessorList:
        """Return an empty list: since 4.45 logits warpers are among the processors."""
        return LogitsProcessorList()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return tied tensors, each with its source; 5.0 expects a dict for `_tied_weights_keys`.

        Legacy code has a list of tensors that checkpoints may lack: then the head is taken as tied
        to the input embedding, if the configuration ties embeddings.
        """
        if all_submodels or isinstance(self._tied_weights_keys, dict):
            return dict(super().get_expanded_tied_weights_keys(all_submodels=all_submodels))
        head = self.get_output_embeddings() if self.config.tie_word_embeddings else None
        if head is None:
            return {}
        names = {module: name for name, module in self.named_modules()}
        return {f"{names[head]}.weight": f"{names[self.get_input_embeddings()]}.weight"}

    def get_output_embeddings(self) -> Any:
        """Return None, the default of 4.x; 5.0 would look for an `lm_head`."""
        return None

    def get_head_mask(
        self, head_mask: Tensor | None, num_hidden_layers: int, is_attention_chunked: bool = False
    ) -> Any:
        """Return a mask, or None, for each layer; removed in 5.0."""
        if head_mask is None:
            return [None] * num_hidden_layers
        layers = head_mask if head_mask.dim() == 2 else head_mask.expand(num_hidden_layers, -1)
        return layers[:, None, :, None, None].to(self.dtype)


def _cut_positions(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap `prepare_inputs_for_generation` to keep the position ids of new tokens only.

    4.x passed no position ids to it; 5.0 passes those of all tokens.
    """

    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if ids is not None and positions is not None:
            inputs["position_ids"] = positions[..., -ids.shape[1] :]
        return inputs

    return prepared


def finish_construction(model: nn.Module) -> None:
    """Call `post_init` of each submodel whose constructor didn't; 5.0 requires the call."""
    for part in reversed(list(model.modules())):
        if isinstance(part, LegacyModel) and "all_tied_weights_keys" not in vars(part):
            prepare: Any = part.post_init  # not annotated there
            prepare()
