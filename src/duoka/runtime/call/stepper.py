"""The forward calls of `generate`, made without reading logits, for tracing and checking.

`generate` itself needs the values of logits to go on. A `Stepper` makes the same forward calls with
the same arguments: the prompt (or its chunks), then one token at a time over the cache. Each step
ends with sampling from the last logits, on the device of the caller's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from duoka.forecast.alloc_events import refuse_short
from duoka.forecast.profile import Phase
from duoka.forecast.workload import Conditions, Workload
from duoka.models.cache_argument import CACHE_NAMES, cache_in
from duoka.models.kv_cache import lengthen, longer

from ..dispatch.copies import carry
from ..image_inputs import ImagePrompts
from .encode_images import ImageReader, encodes_apart, refuse_parts
from .generate import GenerateCaller

_PLAIN = Conditions()
_ENCODED = "encoder_"
_LENGTHEN_TOKENS = 128
_TEMPERATURE, _TOP_P = 0.8, 0.8


class Stepper(GenerateCaller):
    """Runs a model step by step over a batch of sequences and their cache.

    With an encoder-decoder model the tokens of the first step go to the encoder; the decoder begins
    with one token. Several sequences are padded on the left, as prompts of different lengths are.

    Parameters
    ----------
    model : PreTrainedModel
    batch : int
    device : torch.device
        The device on which inputs are made: that of the first module.
    conditions : Conditions
    prompts : ImagePrompts, optional
        The images of the prompt. If the model encodes images before its call, each of `passes` is a
        step before the prompt, and the features are freed in a step after the prompt.
    prompt_tokens : int
        The length of a prompt with images that is read in chunks, else 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        device: torch.device,
        *,
        conditions: Conditions = _PLAIN,
        prompts: ImagePrompts | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        super().__init__(model, conditions.cache, keeps_all_logits=conditions.logits != "last")
        self.batch = batch
        self.device = device
        self.prompts = prompts
        self.prompt_tokens = prompt_tokens
        self.passes: tuple[int, ...] = ()
        if prompts is not None:
            in_chunks = conditions.image_chunk_tokens is not None
            refuse_parts(model, in_passes=conditions.vision_batch is not None, in_chunks=in_chunks)
            if encodes_apart(model):
                self.passes = conditions.passes(batch)
        self._reader: ImageReader | None = None
        self.past = 0
        self._encoded: Any = None
        self.cache: Any = self._new_cache()
        # A model that makes its own cache returns the arguments for its next call.
        self._brings_cache = self.cache is None
        self._next_arguments: dict[str, Any] = {}

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        workload: Workload,
        device: torch.device,
        prompts: ImagePrompts | None = None,
    ) -> Stepper:
        """Make the stepper of a workload; make `prompts` before placing the model on devices."""
        if prompts is not None:
            refuse_short(workload, prompts.least_tokens)
        return cls(
            model,
            workload.batch,
            device,
            conditions=workload.conditions,
            prompts=prompts,
            prompt_tokens=workload.prompt_tokens,
        )

    def run(self, workload: Workload, *, decode_steps: int) -> None:
        """Run a workload's prefill, and a number of decode steps."""
        for phase, tokens in self.prompt_steps(workload):
            self.take(phase, tokens)
        for _ in range(decode_steps):
            self.step(1)

    def prompt_steps(self, workload: Workload) -> Iterator[tuple[Phase, int]]:
        """Yield the steps up to the first new token: phases with numbers of images or tokens."""
        yield from (("encode", images) for images in self.passes)
        yield from (("extend" if past else "prefill", query) for query, past in workload.chunks())
        if self.passes:
            yield "release", 0

    def take(self, phase: Phase, tokens: int) -> None:
        """Run a step of any phase; `tokens` is ignored unless the step reads tokens."""
        if phase == "encode":
            self.encode()
        elif phase == "release":
            self.release()
        else:
            self.step(tokens)

    def encode(self) -> None:
        """Encode the images of the next pass."""
        assert self.prompts is not None, "there are images"
        if self._reader is None:
            pictures = self.prompts.pictures(self.batch, self.device)
            self._reader = ImageReader(self.model, pictures, self.passes)
        self._reader.encode()

    def release(self) -> None:
        """Free the features of the images, once the prompt is read."""
        self._reader = None

    def step(self, query: int) -> None:
        """Run the model over the next `query` tokens."""
        keys = self.past + query
        if self._reader is not None:
            self._call(keys, self._chunk_with_images(self._reader, query))
        elif self.prompts is not None and not self.past:
            inputs = self.prompts.inputs(self.batch, query, self.device)
            if "attention_mask" in inputs:
                self._pad(inputs["attention_mask"])
            self.prefill(inputs)
        elif self._is_pair:
            self._call(keys, self._pair_inputs(query, keys))
        else:
            self._call(keys, self._inputs(query, keys))

    def prefill(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run the model over a prompt given as arguments of `forward`, maybe with images."""
        arguments = {
            **inputs,
            **({"use_cache": True} if "use_cache" in self._accepted else {}),
            **self._logits_to_keep,
            **({self._cache_name: self.cache} if self._cache_name in self._accepted else {}),
            "return_dict": True,
        }
        self._call(self.past + inputs["input_ids"].shape[1], arguments)

    def lengthen(self, tokens: int) -> None:
        """Lengthen the cache by tokens of any content, without computing each if possible.

        A plain cache is lengthened at once; other caches are filled in as few steps as possible.
        """
        # An encoder-decoder cache has one part for the decoder's own keys, another for the encoder.
        plain = getattr(self.cache, "self_attention_cache", self.cache)
        if tokens > 0 and lengthen(plain, tokens):
            self.past += tokens
            return
        while tokens > 0:
            if (cache := longer(self.cache, self.past, tokens)) is not None:
                self.cache = cache
                self.past += tokens
                return
            # A model that makes its own cache accepts one token at a time after its prompt.
            query = 1 if self._brings_cache else min(tokens, _LENGTHEN_TOKENS)
            self.step(query)
            tokens -= query

    def _call(self, keys: int, arguments: dict[str, Any]) -> None:
        """Call the model, keep the cache and arguments for its next call, and sample a token."""
        outputs = self.model(**arguments)
        logits = carry(outputs.logits[:, -1], self.device, copy=True, dtype=torch.float32)
        cache = cache_in(outputs)
        self.cache = self.cache if cache is None else cache
        if self._is_pair:
            self._encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
            for name in (part.name for part in fields(outputs)):
                if name.startswith(_ENCODED):  # a decoder may read further encoder outputs
                    setattr(self._encoded, name.removeprefix(_ENCODED), getattr(outputs, name))
        elif self._brings_cache:
            arguments = self.model._update_model_kwargs_for_generation(outputs, {})
            self._next_arguments = {k: v for k, v in arguments.items() if k not in CACHE_NAMES}
        # `generate` frees the outputs, all logits included, only after choosing a token; until then
        # it also holds the scores and the probabilities from which the previous token was chosen.
        earlier_scores = [torch.empty_like(logits) for _ in range(2)] if self.past else []
        _sample(logits)
        del earlier_scores, outputs
        self.past = keys

    def _chunk_with_images(self, reader: ImageReader, query: int) -> dict[str, Any]:
        """Make the arguments for a chunk of a prompt whose images have been encoded."""
        assert self.prompts is not None, "there are images"
        if not self.past:
            text = self.prompts.text(self.batch, self.prompt_tokens or query)
            if self.batch > 1:
                self._pad(text["attention_mask"])
            reader.begin(text)
        arguments = reader.arguments(self.past, self.past + query)
        return self._prepare(
            arguments.pop("input_ids"),
            is_first_iteration=True,
            use_cache=True,
            **arguments,
            **self._logits_to_keep,
            **{self._cache_name: self.cache},
        )

    def _inputs(self, query: int, keys: int) -> dict[str, Any]:
        """Make the arguments for the last `query` of `keys` tokens."""
        ids, mask = self._ids_and_mask(keys)
        positions = mask.cumsum(-1) - 1
        positions = positions.masked_fill(mask == 0, 0)
        return self._prepare(
            ids,
            next_sequence_length=query,
            is_first_iteration=self.past == 0,
            attention_mask=mask,
            use_cache=True,
            **{"position_ids": positions} if "position_ids" in self._accepted else {},
            **self._logits_to_keep,
            **self._next_arguments,
            **{self._cache_name: self.cache},
        )

    def _pair_inputs(self, query: int, keys: int) -> dict[str, Any]:
        """Make the arguments of an encoder-decoder model, whose encoder runs in the first step."""
        ids, mask = self._ids_and_mask(keys)
        if self._encoded is None:
            num_decoded, num_encoded = 1, query
            encoder_inputs: dict[str, Any] = {"input_ids": ids}
        else:
            num_decoded, num_encoded = query, self._encoded.last_hidden_state.shape[1]
            encoder_inputs = {"encoder_outputs": self._encoded}
        return {
            **encoder_inputs,
            "attention_mask": mask[:, :num_encoded],
            "decoder_input_ids": ids[:, :num_decoded].clone(),
            self._cache_name: self.cache,
            "use_cache": True,
            "return_dict": True,
        }

    def _ids_and_mask(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make token ids and an attention mask, [batch, keys] each."""
        ids = torch.ones((self.batch, keys), dtype=torch.long, device=self.device)
        mask = torch.ones((self.batch, keys), dtype=torch.long, device=self.device)
        self._pad(mask)
        return ids, mask

    def _pad(self, mask: torch.Tensor) -> None:
        """Mask the first token of all sequences but the last, as left padding."""
        if self.batch > 1:
            mask[:-1, :1] = 0


def _sample(scores: torch.Tensor) -> None:
    """Sample tokens from scores [batch, vocabulary] with temperature and top p.

    Of the usual sampling methods of `generate` this one needs the most memory.
    """
    scores = scores / _TEMPERATURE
    ordered, order = torch.sort(scores)
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - _TOP_P
    removed = removed.scatter(1, order, removed)
    scores = scores.masked_fill(removed, -torch.inf)
    torch.multinomial(scores.softmax(dim=-1), num_samples=1)
