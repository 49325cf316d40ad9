"""Steps: calling a language model as transformers' `generate` calls it, and as people train it.

Tracing and proving can't use `generate` itself, which needs the values of logits to go on. They
make the same forward calls with the same arguments instead: the prompt (or its chunks), then
one token at a time over the cache; each step ends in sampling from the last logits, where the
caller's inputs are.

In training, a micro-batch is one forward call with labels, in which the model's own code computes
the loss, and one backward from it. A step is some micro-batches, the optimizer, and gradients set
to None, as `zero_grad` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from duoka.errors import ModelError, UsageError
from duoka.forecast.profile import Phase
from duoka.forecast.workload import Conditions, Training, Workload, refuse_short
from duoka.models.cache_argument import CACHE_NAMES, cache_in, cache_name
from duoka.models.kv_cache import lengthen, longer, new_cache

from .dispatch.copies import carry
from .encode_images import ImageReader, encodes_apart, refuse_parts
from .image_inputs import ImagePrompts
from .optimizers import make_optimizer, update

_PLAIN = Conditions()
_ENCODED = "encoder_"
_Prompts = ImagePrompts | None


def refuse_without_generation(model: nn.Module) -> None:
    """Refuse a model of which only its caller knows how it is called: a classifier, an encoder."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        raise UsageError(
            f"{type(model).__name__} generates no text, so nothing says how it is called",
            hint="give a model object with example inputs: duoka.plan(model, fleet, inputs=…)",
        )


class Stepper:
    """One sequence of steps over one cache.

    The model is a causal one, or an encoder with a decoder, on whatever devices it lies; of the
    latter the first step's tokens are the encoder's, and the decoder begins with one. Several
    sequences come with padding on the left, as prompts of different lengths have it. `device` is
    where the caller's inputs are made: that of the first module. With `prompts` these images are in
    the prompt; where the model encodes them apart there are steps for that, with `passes` images,
    before the prompt, and one after it in which their features end. A prompt that is read in chunks
    has `prompt_tokens`.
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
        refuse_without_generation(model)
        self.model: Any = model
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
        self.encoded: Any = None
        # What a model with a cache of its own asks `generate` to say in its next call.
        self._next_arguments: dict[str, Any] = {}
        self.cache: Any = new_cache(model, conditions.cache)
        self._brings_cache = self.cache is None
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
            prompts=prompts,
            prompt_tokens=workload.prompt_tokens,
        )

    def take(self, phase: Phase, tokens: int) -> None:
        """Take a step of any phase; when images are encoded, `tokens` are images."""
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
        """Let go of what images became: the prompt is read."""
        self._reader = None

    def step(self, query: int) -> None:
        """Run the model over `query` more tokens."""
        if self._reader is not None:
            self._read(self._reader, query)
            return
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

    def _read(self, reader: ImageReader, query: int) -> None:
        """Read some of a prompt whose images are encoded, prepared as `generate` does it."""
        assert self.prompts is not None, "there are images"
        if not self.past:
            text = self.prompts.text(self.batch, self.prompt_tokens or query)
            if self.batch > 1:
                text["attention_mask"][:-1, :1] = 0
            reader.begin(text)
        arguments = reader.arguments(self.past, self.past + query)
        ids = arguments.pop("input_ids")
        prepare: Any = self.model.prepare_inputs_for_generation
        inputs: dict[str, Any] = prepare(
            ids,
            is_first_iteration=True,
            use_cache=True,
            **arguments,
            **self._kept_logits,
            **{self._cache_name: self.cache},
        )
        self._step(self.past + query, {**inputs, "return_dict": True})

    def _step(self, keys: int, arguments: dict[str, Any]) -> None:
        outputs = self.model(**arguments)
        logits = carry(outputs.logits[:, -1], self.device, copy=True, dtype=torch.float32)
        cache = cache_in(outputs)
        self.cache = self.cache if cache is None else cache
        if self.model.config.is_encoder_decoder:
            self.encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
            for name in (part.name for part in fields(outputs)):
                if name.startswith(_ENCODED):  # a decoder may ask for what only its encoder has
                    setattr(self.encoded, name.removeprefix(_ENCODED), getattr(outputs, name))
        elif self._brings_cache:
            arguments = self.model._update_model_kwargs_for_generation(outputs, {})
            self._next_arguments = {k: v for k, v in arguments.items() if k not in CACHE_NAMES}
        del outputs
        _sample(logits)
        self.past = keys

    def run(self, workload: Workload, *, decode_steps: int) -> None:
        """Run a workload's prefill, and some decode steps."""
        for phase, tokens in self.prompt_steps(workload):
            self.take(phase, tokens)
        for _ in range(decode_steps):
            self.step(1)

    def prompt_steps(self, workload: Workload) -> Iterator[tuple[Phase, int]]:
        """The steps up to the first new token: phases, with their images or tokens."""
        yield from (("encode", images) for images in self.passes)
        yield from (("extend" if past else "prefill", query) for query, past in workload.chunks())
        if self.passes:
            yield "release", 0

    def lengthen(self, tokens: int) -> None:
        """Let the cache hold that many more tokens, without computing them one by one.

        A plain cache is made longer; one with a layout of its own is filled in a few steps.
        """
        if tokens <= 0:
            return
        # A decoder's cache is beside the one of what the encoder made.
        if lengthen(getattr(self.cache, "self_attention_cache", self.cache), tokens):
            self.past += tokens
            return
        while tokens:
            if (cache := longer(self.cache, self.past, tokens)) is not None:
                self.cache = cache
                self.past += tokens
                return
            # A model with a cache of its own is called with one token after its prompt.
            query = 1 if self._brings_cache else min(tokens, _LENGTHEN_TOKENS)
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
            attention_mask=mask,
            use_cache=True,
            **{"position_ids": positions} if "position_ids" in self._accepted else {},
            **self._kept_logits,
            **self._next_arguments,
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
            self._cache_name: self.cache,
            "use_cache": True,
            "return_dict": True,
        }


_LENGTHEN_TOKENS = 128
_TEMPERATURE, _TOP_P = 0.8, 0.8


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


_STEPS = 2
"""Optimizer's states are made in the first step, and are there from the second one on."""


def autocast_for(workload: Workload, device: torch.device) -> AbstractContextManager[Any]:
    """What forward passes of training run in: autocast, where master weights are in float32.

    What is cast isn't cached: with the cache CUDA would keep a copy of all that is trained.
    """
    dtype = getattr(torch, workload.dtype)
    if workload.training is None or not workload.training.master_weights or dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class Learner:
    """Training steps on a model that `models.make_trainable` has made ready.

    The workload has training, and its dtype resolved; several sequences come with padding. Inputs
    are made on the device of the first module. The sequences hold the images of `prompts`, which
    were made of the model before it was spread.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, device: torch.device, prompts: _Prompts = None
    ) -> None:
        assert workload.training is not None, "the workload is to train"
        if prompts is not None:
            refuse_short(workload, prompts.least_tokens)
        self.prompts = prompts
        self.model: Any = model
        self.workload = workload
        self.training: Training = workload.training
        self.device = device
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._optimizer: torch.optim.Optimizer | None = None

    def look(self) -> None:
        """Run the model without labels: they go where its own code brings them."""
        inputs = self._inputs()
        labels = inputs.pop("labels")
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = labels
        with torch.no_grad(), self._autocast():
            self.model(**inputs)

    def forward(self) -> torch.Tensor:
        """Run the model over one micro-batch; its loss."""
        with torch.enable_grad(), self._autocast():
            loss: torch.Tensor | None = self.model(**self._inputs()).loss
        if loss is None:
            raise ModelError(
                f"{type(self.model).__name__} computes no loss from labels",
                hint="duoka forecasts the training of models that do",
            )
        return loss

    def update(self) -> None:
        """Let the optimizer make its step, and drop the gradients."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self.model, self.training.optimizer)
        update(self._optimizer)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Set gradients to None."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self, *, in_flight: int = 1, steps: int = _STEPS) -> None:
        """Run whole steps."""
        for _ in range(steps):
            losses: list[torch.Tensor] = []
            for _ in range(self.training.micro_batches):
                if len(losses) == in_flight:
                    losses.pop(0).backward()
                losses.append(self.forward())
            while losses:
                losses.pop(0).backward()
            self.update()

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast_for(self.workload, self.device)

    def _inputs(self) -> dict[str, Any]:
        shape = (self.workload.batch, self.workload.prompt_tokens)
        if self.prompts is None:
            ids = torch.ones(shape, dtype=torch.long, device=self.device)
            inputs: dict[str, Any] = {"input_ids": ids}
        else:
            inputs = dict(self.prompts.inputs(*shape, self.device))
            inputs.pop("attention_mask", None)
        ids = inputs["input_ids"]
        inputs["labels"] = ids.clone()
        config = getattr(self.model, "config", None)
        is_pair = getattr(config, "is_encoder_decoder", False)
        if self.training.rows == "packed":
            positions = torch.arange(shape[1], device=self.device)
            # two samples in each row
            inputs["position_ids"] = (positions % -(-shape[1] // 2)).expand(shape).contiguous()
        elif self.training.rows == "padded" and "attention_mask" in self._accepted and not is_pair:
            mask = torch.ones_like(ids)
            if self.workload.batch > 1:
                mask[:-1, :1] = 0
            inputs["attention_mask"] = mask
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False
        return inputs
