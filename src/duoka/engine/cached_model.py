"""Models run as transformers' `generate` runs them: a cache of its own for each sequence.

These are models whose layers can't read from pages (state spaces, linear attention, encoders with a
decoder, code with an attention of its own), plans for another cache than a growing one, and plans
with images. A prompt is read at once, in the chunks that were planned, so that no answer depends on
company, and no two prompts share anything: equal tokens may stand for different pictures. Their
steps are those of the engine all the same, so that many requests are on their way at once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.workload import Workload
from duoka.models.cache_argument import CACHE, cache_name
from duoka.models.kv_cache import new_cache
from duoka.runtime.encode_images import READ_ONCE, image_arguments

from .step import Chunk

_FEW_TOKENS = 8


class CachedModel:
    """Computes the logits of steps of any model that generates; see `PagedModel`.

    Nothing is computed twice: a chunk that has failed is lost, and its sequence with it.

    Parameters
    ----------
    model : PreTrainedModel
    workload : Workload
        Its cache, its chunks, and how many images are encoded at a time.

    Raises
    ------
    ModelError
        If prompts are to be read in chunks, and the model can't.
    """

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        self._model: Any = model
        self._workload = workload
        self._cache_name = cache_name(model)
        # Of each sequence what `generate` carries from one call to the next.
        self._arguments: dict[int, dict[str, Any]] = {}
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._is_pair = model.config.is_encoder_decoder
        settings: Any = model.generation_config
        self._start_token = settings.decoder_start_token_id
        if self._start_token is None:
            self._start_token = settings.bos_token_id
        self._settings = copy.copy(settings)
        self.keeps_state_in_modules = self._new_cache() is None or self._mixes()
        """Whether the model has room for one sequence alone, in its modules."""
        chunk = workload.prefill_chunk_tokens
        assert chunk != "auto", "a plan's workload is resolved"
        if chunk is not None and chunk < workload.prompt_tokens:
            self._refuse_forgetful()
            self._settings.prefill_chunk_size = chunk

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run whole prompts and single tokens; the logits after them, [chunks, vocabulary]."""
        return torch.cat([self._run(chunk) for chunk in chunks])

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""
        self._arguments.pop(sequence, None)

    def close(self) -> None:
        """Let go of all caches."""
        self._arguments.clear()

    @torch.no_grad()
    def _mixes(self) -> bool:
        """Whether a sequence answers otherwise beside another one, as RecurrentGemma's."""
        prompt, other = (Chunk(number, [number] * _FEW_TOKENS, 0, (), None) for number in (1, 2))
        answer = Chunk(prompt.sequence, [1], _FEW_TOKENS, (), None)
        logits = []
        for company in ([], [other]):
            *_, last = [self._run(chunk) for chunk in (prompt, *company, answer)]
            logits.append(last)
            self._arguments.clear()
        return not self._alike(*logits)

    @torch.no_grad()
    def _refuse_forgetful(self) -> None:
        """Refuse a model that doesn't go on where a chunk has ended, as Jamba's in transformers 5.

        `generate` reads chunks with transformers' own argument alone.
        """
        goes_on = False
        if self._cache_name == CACHE and not self.keeps_state_in_modules:
            with suppress(AttributeError, IndexError, ValueError):  # of a cache without keys, say
                goes_on = self._alike(*map(self._first_logits, (_FEW_TOKENS, _FEW_TOKENS // 2)))
        if not goes_on:
            raise ModelError(
                f"{type(self._model).__name__} can't read a prompt in chunks: what it computes "
                "then isn't what it computes of the whole prompt",
                hint="plan with --prefill-chunk none",
            )

    def _first_logits(self, size: int) -> Tensor:
        """Those after a few tokens that are read in chunks of a size, [1, vocabulary]."""
        chunk = Chunk(0, [1] * _FEW_TOKENS, 0, (), None)
        ids = torch.tensor([chunk.tokens], device=self._model.device)
        settings = copy.copy(self._settings)
        settings.prefill_chunk_size = size
        arguments = self._begin(chunk, ids)
        # One of 8 bit rounds what a chunk leaves to the next.
        arguments[self._cache_name] = new_cache(self._model)
        logits: Tensor = self._model._prefill(ids, settings, arguments).logits[:, -1].float()
        return logits

    def _alike(self, one: Tensor, other: Tensor) -> bool:
        rounding = max(8 * torch.finfo(self._model.dtype).eps, 1e-3)
        return bool((one - other).norm() <= rounding * one.norm())

    def _run(self, chunk: Chunk) -> Tensor:
        model = self._model
        ids = torch.tensor([chunk.tokens], device=model.device)
        if chunk.start:
            # `generate` hands all tokens so far to the model, which takes the last ones of them.
            arguments = self._arguments.pop(chunk.sequence)
            ids = torch.cat([arguments.pop("ids"), ids], dim=1)
            inputs = model.prepare_inputs_for_generation(
                ids, next_sequence_length=len(chunk.tokens), is_first_iteration=False, **arguments
            )
            outputs = model(**inputs, return_dict=True)
        else:
            arguments = self._begin(chunk, ids)
            if self._is_pair:
                ids = ids.new_tensor([[self._start_token]])
            outputs = model._prefill(ids, self._settings, arguments)
            arguments = {k: v for k, v in arguments.items() if k not in READ_ONCE}
        arguments = model._update_model_kwargs_for_generation(
            outputs, arguments, is_encoder_decoder=self._is_pair
        )
        self._arguments[chunk.sequence] = {**arguments, "ids": ids}
        logits: Tensor = outputs.logits[:, -1]
        return logits.to(copy=True, dtype=torch.float32)  # of a prompt there may be many more

    def _begin(self, chunk: Chunk, ids: Tensor) -> dict[str, Any]:
        """What `generate` has before its first call."""
        model, mask = self._model, torch.ones_like(ids)
        arguments: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
        if self._is_pair:
            arguments["encoder_outputs"] = model.get_encoder()(
                input_ids=ids, attention_mask=mask, return_dict=True
            )
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = 1
        if chunk.images is not None:
            size = self._workload.conditions.vision_batch
            arguments |= image_arguments(model, [chunk.images], ids.device, size)
        if "position_ids" in self._accepted and not self._is_pair:
            # Made on the CPU: a virtual GPU doesn't compute with as many numbers.
            known = {
                name: value.cpu()
                for name, value in {**arguments, "attention_mask": mask}.items()
                if isinstance(value, Tensor) and name not in READ_ONCE
            }
            tokens = torch.tensor([chunk.tokens])
            positions = model._prepare_position_ids_for_generation(tokens, known)
            arguments["position_ids"] = positions.to(ids.device)
        cache = self._new_cache()
        if cache is not None:
            arguments[self._cache_name] = cache
        return arguments

    def _new_cache(self) -> Any:
        return new_cache(self._model, self._workload.cache)
