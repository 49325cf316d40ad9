"""Steps: calling a causal language model as transformers' `generate` calls it.

Tracing and proving can't use `generate` itself, which needs the values of logits to go on. They
make the same forward calls with the same arguments instead: the prompt (or its chunks), then
one token at a time over the cache; each step ends in sampling from the last logits, where the
caller's inputs are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from duoka.forecast.workload import Conditions, Workload, refuse_short
from duoka.models.kv_cache import cache_name, lengthen, new_cache

from .image_inputs import ImagePrompts

_PLAIN = Conditions()


class Stepper:
    """One sequence of steps over one cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or an encoder with a decoder, on whatever devices it lies. For
        the latter the first step's tokens are the encoder's, and the decoder begins with one.
    batch : int
        More than one comes with padding on the left, as prompts of different lengths have it.
    device : torch.device
        Where the caller's inputs are made: the device of the first module.
    conditions : Conditions, optional
        The kind of cache, and of which positions logits are made.
    context_tokens : int
        What a static cache is made for.
    prompts : ImagePrompts, optional
        The first step has these images in its prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        device: torch.device,
        *,
        conditions: Conditions = _PLAIN,
        context_tokens: int = 0,
        prompts: ImagePrompts | None = None,
    ) -> None:
        self.model: Any = model
        self.batch = batch
        self.device = device
        self.prompts = prompts
        self.past = 0
        self.encoded: Any = None
        self.cache: Any = new_cache(model, conditions.cache, context_tokens=context_tokens)
        # Of one sequence no mask is left in `generate`; a static cache makes one of its own.
        self._masked = batch > 1 or conditions.cache != "static"
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = cache_name(model)
        few = conditions.logits == "last" and "logits_to_keep" in self._accepted
        self._kept_logits = {"logits_to_keep": 1} if few else {}

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        workload: Workload,
        device: torch.device,
        prompts: ImagePrompts | None = None,
    ) -> Stepper:
        """The steps of a workload, with `prompts_for` of a model that wasn't spread yet."""
        if prompts is not None:
            refuse_short(workload, prompts.least_tokens)
        return cls(
            model,
            workload.batch,
            device,
            conditions=workload.conditions,
            context_tokens=workload.static_tokens,
            prompts=prompts,
        )

    def step(self, query: int) -> None:
        """Run the model over `query` more tokens."""
        if self.prompts is not None and not self.past:
            inputs = self.prompts.inputs(self.batch, query, self.device)
            if self.batch > 1 and "attention_mask" in inputs:
                inputs["attention_mask"][:-1, :1] = 0
            self.prefill(inputs)
            return
        self._step(self.past + query, self._inputs(query, self.past + query))

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run the model over a prompt that is given, with images for example."""
        arguments = {
            **inputs,
            **({"use_cache": True} if "use_cache" in self._accepted else {}),
            **self._kept_logits,
            **({self._cache_name: self.cache} if self._cache_name in self._accepted else {}),
            "return_dict": True,
        }
        self._step(self.past + inputs["input_ids"].shape[1], arguments)

    def _step(self, keys: int, arguments: dict[str, Any]) -> None:
        outputs = self.model(**arguments)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=self.device)
        cache = next((outputs[name] for name in _CACHES if outputs.get(name) is not None), None)
        self.cache = self.cache if cache is None else cache
        if self.model.config.is_encoder_decoder:
            self.encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
        del outputs
        _sample(logits)
        self.past = keys

    def run(self, workload: Workload, *, decode_steps: int) -> None:
        """Run a workload's prefill, and some decode steps."""
        for query, _ in workload.chunks():
            self.step(query)
        for _ in range(decode_steps):
            self.step(1)

    def lengthen(self, tokens: int) -> None:
        """Let the cache hold that many more tokens, without computing them one by one.

        A plain cache is made longer; one with a layout of its own is filled in a few steps.
        """
        if tokens <= 0:
            return
        if lengthen(self.cache, tokens):
            self.past += tokens
            return
        while tokens:
            query = min(tokens, _LENGTHEN_TOKENS)
            self.step(query)
            tokens -= query

    def _inputs(self, query: int, keys: int) -> dict[str, Any]:
        """The arguments of `forward`, as the model itself prepares them for `generate`."""
        ids = torch.ones((self.batch, keys), dtype=torch.long, device=self.device)
        mask = torch.ones((self.batch, keys), dtype=torch.long, device=self.device)
        if self.batch > 1:
            mask[:-1, :1] = 0
        if self.model.config.is_encoder_decoder:
            return self._pair_inputs(ids, mask, query)
        positions = mask.cumsum(-1) - 1
        positions = positions.masked_fill(mask == 0, 0)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=query,
            is_first_iteration=self.past == 0,
            attention_mask=mask if self._masked else None,
            use_cache=True,
            **{"position_ids": positions} if "position_ids" in self._accepted else {},
            **self._kept_logits,
            **{self._cache_name: self.cache},
        )
        return {**inputs, "return_dict": True}

    def _pair_inputs(self, ids: torch.Tensor, mask: torch.Tensor, query: int) -> dict[str, Any]:
        """The same for an encoder with a decoder: the encoder runs in the first step only."""
        if self.encoded is None:
            num_decoded, num_encoded = 1, query
            read: dict[str, Any] = {"input_ids": ids}
        else:
            num_decoded, num_encoded = query, self.encoded.last_hidden_state.shape[1]
            read = {"encoder_outputs": self.encoded}
        return {
            **read,
            "attention_mask": mask[:, :num_encoded],
            "decoder_input_ids": ids[:, :num_decoded].clone(),
            "past_key_values": self.cache,
            "use_cache": True,
            "return_dict": True,
        }


_LENGTHEN_TOKENS = 128
_TEMPERATURE, _TOP_P = 0.8, 0.8
_CACHES = ("past_key_values", "cache_params")


def _sample(scores: torch.Tensor) -> None:
    """Choose tokens as `generate` does with a temperature and a top p, its dearest usual way.

    scores [batch, vocabulary]
    """
    scores = scores / _TEMPERATURE
    ordered, order = torch.sort(scores)
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - _TOP_P
    removed = removed.scatter(1, order, removed)
    scores = scores.masked_fill(removed, -torch.inf)
    torch.multinomial(scores.softmax(dim=-1), num_samples=1)
