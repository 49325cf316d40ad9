"""Runs chunks of many sequences, each sequence with a cache of its own, as `generate` does.

Used for models whose layers can't read from pages (state spaces, linear attention, encoders with a
decoder, attention code of their own), for plans with another kind of cache than a dynamic one, and
for plans with images. A whole prompt is one `Chunk`, which the model reads in the plan's prefill
chunks. So no generation depends on another, and prompts share no cache: equal image tokens may
stand for different pictures.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.workload import Workload
from duoka.models.cache_argument import CACHE
from duoka.models.kv_cache import new_cache

from .chunk import Chunk
from .encode_images import READ_ONCE, image_arguments
from .generate import GenerateCaller

_TRIAL_TOKENS = 8


class CachedModel(GenerateCaller):
    """Computes the logits of chunks, for any generating model; see `PagedModel`.

    A chunk can't be recomputed: after a failure its sequence is lost.

    Parameters
    ----------
    model : PreTrainedModel
    workload : Workload
        Gives the kind of cache, the prefill chunks, and the number of images encoded at a time.

    Raises
    ------
    ModelError
        If the workload has prefill chunks, and the model doesn't support them.
    """

    def __init__(self, model: PreTrainedModel, workload: Workload) -> None:
        super().__init__(model, workload.cache)
        self._workload = workload
        # By sequence: the arguments that `generate` carries from one call to the next.
        self._arguments: dict[int, dict[str, Any]] = {}
        settings: Any = model.generation_config
        self._start_token = settings.decoder_start_token_id
        if self._start_token is None:
            self._start_token = settings.bos_token_id
        self._settings = copy.copy(settings)
        self.keeps_state_in_modules = self._new_cache() is None or self._mixes_sequences()
        """True if the model keeps its state in its modules, for a single sequence."""
        size = workload.prefill_chunk_tokens
        assert size != "auto", "a plan's workload is resolved"
        if size is not None and size < workload.prompt_tokens:
            if not self._reads_in_chunks():
                raise ModelError(
                    f"{type(model).__name__} doesn't support chunked prefill: its outputs differ "
                    "from those of a single pass",
                    hint="plan with --prefill-chunk none",
                )
            self._settings.prefill_chunk_size = size

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run whole prompts and single tokens; return the logits after them, [chunks, vocabulary].

        Each chunk is a call of its own.
        """
        return torch.cat([self._run_chunk(chunk) for chunk in chunks])

    def forget(self, sequence: int) -> None:
        """Free the cache of an ended sequence."""
        self._arguments.pop(sequence, None)

    def close(self) -> None:
        """Free all caches."""
        self._arguments.clear()

    @torch.no_grad()
    def _mixes_sequences(self) -> bool:
        """Return True if a call for one sequence changes the logits of another (RecurrentGemma)."""
        # Both runs decode a token of sequence 1; the second run reads sequence 2 in between.
        prompt, second = (Chunk(number, [number] * _TRIAL_TOKENS, 0, (), None) for number in (1, 2))
        decoded = Chunk(prompt.sequence, [1], _TRIAL_TOKENS, (), None)
        logits = []
        for chunks in ([prompt, decoded], [prompt, second, decoded]):
            logits.append([self._run_chunk(chunk) for chunk in chunks][-1])
            self._arguments.clear()
        return not self._agree(*logits)

    @torch.no_grad()
    def _reads_in_chunks(self) -> bool:
        """Return True if chunks give the logits of the whole prompt.

        Some models forget earlier chunks without an error (Jamba, in transformers 5).
        """
        # `generate` reads chunks only through transformers' own argument for the cache.
        if self._cache_name != CACHE or self.keeps_state_in_modules:
            return False
        with suppress(AttributeError, IndexError, ValueError):  # raised by caches without keys
            return self._agree(*map(self._first_logits, (_TRIAL_TOKENS, _TRIAL_TOKENS // 2)))
        return False

    def _first_logits(self, size: int) -> Tensor:
        """Return the logits after a short trial prompt, read in chunks of `size` tokens."""
        chunk = Chunk(0, [1] * _TRIAL_TOKENS, 0, (), None)
        ids = torch.tensor([chunk.tokens], device=self.model.device)
        settings = copy.copy(self._settings)
        settings.prefill_chunk_size = size
        arguments = self._first_arguments(chunk, ids)
        # An 8-bit cache rounds the keys and values of a chunk before the next chunk reads them.
        arguments[self._cache_name] = new_cache(self.model)
        logits: Tensor = self.model._prefill(ids, settings, arguments).logits[:, -1].float()
        return logits

    def _agree(self, logits: Tensor, expected: Tensor) -> bool:
        """Return True if logits are equal up to rounding in the model's dtype."""
        rounding = max(8 * torch.finfo(self.model.dtype).eps, 1e-3)
        return bool((logits - expected).norm() <= rounding * logits.norm())

    # The loop of `generate`, one iteration per call: `_prefill` reads a prompt; later iterations
    # prepare the inputs of one token and call the model. The arguments that `generate` carries from
    # one iteration to the next (cache, mask, positions) are kept by sequence, so that iterations of
    # several sequences can alternate.
    def _run_chunk(self, chunk: Chunk) -> Tensor:
        """Run one chunk; return the logits after its last token, [1, vocabulary], in float32."""
        model = self.model
        ids = torch.tensor([chunk.tokens], device=model.device)
        if chunk.start:
            # `generate` passes all tokens so far; the model uses the last `next_sequence_length`.
            arguments = self._arguments.pop(chunk.sequence)
            ids = torch.cat([arguments.pop("ids"), ids], dim=1)
            inputs = self._prepare(
                ids, is_first_iteration=False, next_sequence_length=len(chunk.tokens), **arguments
            )
            outputs = model(**inputs)
        else:
            arguments = self._first_arguments(chunk, ids)
            if self._is_pair:
                ids = ids.new_tensor([[self._start_token]])
            outputs = model._prefill(ids, self._settings, arguments)
            arguments = {k: v for k, v in arguments.items() if k not in READ_ONCE}
        arguments = model._update_model_kwargs_for_generation(
            outputs, arguments, is_encoder_decoder=self._is_pair
        )
        self._arguments[chunk.sequence] = {**arguments, "ids": ids}
        logits: Tensor = outputs.logits[:, -1]
        return logits.to(copy=True, dtype=torch.float32)  # a view would keep all logits

    def _first_arguments(self, chunk: Chunk, ids: Tensor) -> dict[str, Any]:
        """Make the arguments of `generate`'s first call."""
        model, mask = self.model, torch.ones_like(ids)
        arguments: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
        if self._is_pair:
            arguments["encoder_outputs"] = model.get_encoder()(
                input_ids=ids, attention_mask=mask, return_dict=True
            )
        arguments |= self._logits_to_keep
        if chunk.images is not None:
            size = self._workload.conditions.vision_batch
            arguments |= image_arguments(model, [chunk.images], ids.device, size)
        if "position_ids" in self._accepted and not self._is_pair:
            # On the CPU: a virtual GPU without data doesn't keep the values of long prompts.
            on_cpu = {
                name: value.cpu()
                for name, value in {**arguments, "attention_mask": mask}.items()
                if isinstance(value, Tensor) and name not in READ_ONCE
            }
            tokens = torch.tensor([chunk.tokens])
            positions = model._prepare_position_ids_for_generation(tokens, on_cpu)
            arguments["position_ids"] = positions.to(ids.device)
        cache = self._new_cache()
        if cache is not None:
            arguments[self._cache_name] = cache
        return arguments
