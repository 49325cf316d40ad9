"""Generation on top of transformers' `generate`: a batch at once, or one answer as a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from duoka.base.units import format_count
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.sampling_params import Sampling
from duoka.checkpoint.tokenizer_files import beyond_embedding
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.models.from_checkpoint import tokenizer_of
from duoka.models.kv_cache import cache_name, new_cache
from duoka.models.text.image_prompts import ImagePrompt
from duoka.models.text.messages import Message
from duoka.models.text.prompts import ChatFormat, chat_format
from duoka.report.measured import Measured

from .devices import peak_bytes, synchronize
from .encode_images import Forget, image_arguments
from .stream import Stop, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer.

    Parameters
    ----------
    text : str
        As it is shown to people.
    prompt_tokens, new_tokens : int
        Without padding; the token that ended the answer isn't counted.
    finish : {"stop", "length"}
        Whether the model ended it, or the limit.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish: Literal["stop", "length"]


class Clock(StoppingCriteria):
    """Notes when the tokens of one generation come, and ends nothing."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.times: list[float] = []
        self.num_rows = self.context_tokens = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`: one flag for each sequence."""
        synchronize(input_ids.device)  # which may still be computing the token
        self.times.append(time.monotonic())
        self.num_rows, self.context_tokens = input_ids.shape
        return torch.zeros(self.num_rows, dtype=torch.bool, device=input_ids.device)


class Pace:
    """How fast the answers of one generator came."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = []

    def start(self) -> Clock:
        """The clock of the next generation."""
        self._clocks.append(Clock())
        return self._clocks[-1]

    def measured(self, names: Iterable[str]) -> Measured:
        """What there is to say so far, with the peaks of these devices."""
        clocks = [clock for clock in self._clocks if clock.times]
        waited = [clock.times[0] - clock.started_at for clock in clocks]
        tokens = sum(clock.num_rows * (len(clock.times) - 1) for clock in clocks)
        seconds = sum(clock.times[-1] - clock.times[0] for clock in clocks)
        return Measured(
            devices=tuple(filter(None, map(peak_bytes, names))),
            context_tokens=max((clock.context_tokens for clock in clocks), default=0),
            first_token_seconds=sum(waited) / len(waited) if waited else None,
            tokens_per_second=tokens / seconds if seconds else None,
        )


class PromptReader:
    """A checkpoint's tokenizer and prompt format, within the limits of a workload."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, workload: Workload
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.workload = workload

    @classmethod
    def open(cls, checkpoint: Checkpoint, workload: Workload) -> PromptReader:
        """The reader of a checkpoint whose tokenizer is on this machine."""
        tokenizer = tokenizer_of(checkpoint)
        # What code of a checkpoint's own reads of images, only that code knows.
        directory = None if checkpoint.builds_own_model else checkpoint.path
        chat = chat_format(tokenizer, checkpoint.config, checkpoint.generation_config, directory)
        return cls(tokenizer, chat, workload)

    def prompt(
        self, question: str, *, system: str | None = None, images: Sequence[Image] = ()
    ) -> list[int]:
        """The token ids of a single question; with images an `ImagePrompt`."""
        messages = [Message(role="system", content=system)] if system else []
        user = Message(role="user", content=question, images=tuple(images))
        return self.chat.prompt([*messages, user])

    def plain(self, text: str) -> list[int]:
        """The token ids of a text that is to be continued."""
        ids: list[int] = self.tokenizer.encode(text, split_special_tokens=True)
        return ids

    def check_images(self, images: Sequence[Image]) -> None:
        """Refuse images of one prompt that no memory was planned for."""
        planned, reader = self.workload, self.chat.images
        if not images:
            return
        if reader is None:
            raise UsageError("this model takes no images", hint="leave the images out")
        if len(images) > planned.images:
            raise UsageError(
                f"{format_count(len(images), 'image')} in a prompt; the plan has memory for "
                f"{planned.images}",
                hint="plan with a larger --images, and with their --image-size",
            )
        height, width = planned.image_size
        most = reader.pixel_count(new_image("RGB", (width, height)))
        for image in images:
            if reader.pixel_count(image) > most:
                raise UsageError(
                    f"an image of {image.width}x{image.height}; the plan has memory for images of "
                    f"{width}x{height}",
                    hint="make it smaller, or plan with a larger --image-size",
                )

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | None) -> None:
        """Refuse what no memory was planned for."""
        planned = self.workload
        if not prompts or not all(map(len, prompts)):
            raise UsageError("there is nothing to answer: a prompt is empty")
        longest = max(map(len, prompts))
        images = [prompt.num_images for prompt in prompts if isinstance(prompt, ImagePrompt)]
        for what, got, limit, option in (
            ("prompts", len(prompts), planned.batch, "--batch"),
            ("images in a prompt", max(images, default=0), planned.images, "--images"),
            ("tokens of prompt", longest, planned.prompt_tokens, "--context"),
            ("new tokens", max_new_tokens or 0, planned.new_tokens, "--new-tokens"),
        ):
            if got > limit:
                raise UsageError(
                    f"{got} {what}; the plan has memory for {limit}",
                    hint=f"plan with a larger {option}",
                )


class Generator(PromptReader):
    """A loaded model with its tokenizer and prompt format, within the limits of a workload.

    Longer prompts, larger batches and longer answers than the workload's are refused: the memory
    for them wasn't planned.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatFormat,
        workload: Workload,
    ) -> None:
        assert workload.prefill_chunk_tokens != "auto", "a plan's workload is resolved"
        super().__init__(tokenizer, chat, workload)
        self.model = model
        self.pace = Pace()

    @classmethod
    def of(cls, model: PreTrainedModel, checkpoint: Checkpoint, workload: Workload) -> Generator:
        """The generator of a model that was loaded from a checkpoint."""
        reader = PromptReader.open(checkpoint, workload)
        return cls(model, reader.tokenizer, reader.chat, workload)

    def stream(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Stream:
        """Start an answer; its pieces come while it is generated.

        Raises
        ------
        UsageError
            If the prompt or the answer is longer than planned.
        """
        sampling = sampling or Sampling()
        self._check([prompt], sampling)

        def run(streamer: BaseStreamer, stop: Stop) -> None:
            self._generate([prompt], sampling, streamer=streamer, stop=stop)

        return Stream(self.tokenizer, self.chat.stop_ids, run)

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
    ) -> tuple[Answer, ...]:
        """Answer several prompts at once; shorter ones are padded on the left.

        Raises
        ------
        UsageError
            If there are more prompts, or longer ones, than planned.
        """
        sampling = sampling or Sampling()
        self._check(prompts, sampling)
        rows = self._generate(prompts, sampling)
        return tuple(
            self._answer(len(prompt), row) for prompt, row in zip(prompts, rows, strict=True)
        )

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.check(prompts, sampling.max_new_tokens)
        refuse_beyond(chain.from_iterable(prompts), num_embeddings(self.model))

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        streamer: BaseStreamer | None = None,
        stop: Stop | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, padding and stop tokens included."""
        ids, mask = self._padded(prompts)
        clock = self.pace.start()
        size = self.workload.conditions.vision_batch
        images = image_arguments(self.model, prompts, ids.device, size)
        criteria: list[StoppingCriteria] = [*([stop] if stop else []), clock]
        if images:  # without any, nothing more is done for each token
            criteria.append(Forget(images))
        with _seeded(sampling.seed, self.model):
            generate: Any = self.model.generate
            output = generate(
                input_ids=ids,
                attention_mask=mask,
                **images,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList(criteria),
                **self._options(sampling),
            )
        # An encoder-decoder's output begins with one start token, others' with the prompt.
        start = 1 if self.model.config.is_encoder_decoder else ids.shape[1]
        rows: list[list[int]] = output[:, start:].tolist()
        return rows

    def _options(self, sampling: Sampling) -> dict[str, Any]:
        planned = self.workload.new_tokens
        options: dict[str, Any] = {
            **sampling.options(),
            "max_new_tokens": min(sampling.max_new_tokens or planned, planned),
            "eos_token_id": list(self.chat.stop_ids) or None,
            "pad_token_id": self._pad_id,
            "return_dict_in_generate": False,
            "num_beams": 1,
            "use_cache": True,
        }
        if not self.model.config.is_encoder_decoder:
            options["prefill_chunk_size"] = self.workload.prefill_chunk_tokens
        return {**options, **self._cache()}

    def _cache(self) -> dict[str, Any]:
        """The cache that was planned, where `generate` wouldn't make it by itself."""
        if self.workload.cache == "dynamic":
            return {}
        tokens = self.workload.static_tokens
        cache = new_cache(self.model, self.workload.cache, context_tokens=tokens)
        # A static cache lets `generate` compile the model, whose memory nobody has planned.
        return {cache_name(self.model): cache, "disable_compile": True}

    @property
    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        if isinstance(pad, int):
            return pad
        # Padding is masked out, so any token will do.
        return next(iter(self.chat.stop_ids), 0)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, [batch, tokens], where the model's first block computes."""
        longest = max(len(prompt) for prompt in prompts)
        gaps = [longest - len(prompt) for prompt in prompts]
        ids = [[self._pad_id] * gap + list(p) for gap, p in zip(gaps, prompts, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _answer(self, prompt_tokens: int, row: Sequence[int]) -> Answer:
        stops = set(self.chat.stop_ids)
        end = next((index for index, token in enumerate(row) if token in stops), None)
        ids = list(row if end is None else row[:end])
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(
            text=str(text).strip(),
            prompt_tokens=prompt_tokens,
            new_tokens=len(ids),
            finish="length" if end is None else "stop",
        )


def num_embeddings(model: PreTrainedModel) -> int | None:
    """The rows of a model's embedding; None where it doesn't tell them."""
    # Not its weight's: that may be in the host's memory.
    return getattr(model.get_input_embeddings(), "num_embeddings", None)


def refuse_beyond(tokens: Iterable[int], rows: int | None) -> None:
    """Refuse tokens that an embedding has no rows for."""
    tokens = list(tokens)
    if min(tokens) < 0:
        raise UsageError(f"token {min(tokens)} is none: tokens are numbers from 0")
    largest = max(tokens)
    if rows is not None and largest >= rows:
        raise beyond_embedding(largest, rows)


@contextmanager
def _seeded(seed: int | None, model: PreTrainedModel) -> Iterator[None]:
    """A scope with random numbers of its own; the caller's go on afterwards as if nothing was."""
    if seed is None:
        yield
        return
    indices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(indices)):
        torch.manual_seed(seed)
        yield
