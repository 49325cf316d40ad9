"""Rules of a checkpoint's generation config: forbidden and forced tokens, as in `generate`.

Each rule has the effect of the transformers logits processor of the same name. Sampling parameters
such as temperature are not part of the rules; see `request.SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from duoka.errors import UsageError

# Settings of `generate` that the engine doesn't support, with the values that have no effect.
_UNSUPPORTED = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """The token rules of a generation config; see `GenerationConfig` of transformers.

    `start` is the decoder's start token of an encoder-decoder model; None for a decoder-only model,
    whose generation continues the prompt.
    """

    start: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int = 0

    @classmethod
    def of(
        cls, model: PreTrainedModel, generation_config: Mapping[str, Any] | None = None
    ) -> GenerationRules:
        """Read the rules of `generation_config`; by default, of the model's own one.

        Raises UsageError if the config is invalid or has a rule that the engine doesn't support.
        """
        settings: Any = model.generation_config
        try:
            if generation_config is not None:
                settings = GenerationConfig.from_dict(dict(generation_config))
            _refuse_unsupported(settings)
            start = settings.decoder_start_token_id
            start = settings.bos_token_id if start is None else start
            return cls(
                start=start if model.config.is_encoder_decoder else None,
                forced_bos=settings.forced_bos_token_id,
                # `generate` gives several forced tokens equal scores; argmax takes the lowest id.
                forced_eos=min(_to_ids(settings.forced_eos_token_id), default=None),
                suppressed=_to_ids(settings.suppress_tokens),
                begin_suppressed=_to_ids(settings.begin_suppress_tokens),
                bad_words=tuple(filter(None, map(_to_ids, settings.bad_words_ids or ()))),
                no_repeat_ngram_size=int(settings.no_repeat_ngram_size or 0),
                encoder_no_repeat_ngram_size=int(settings.encoder_no_repeat_ngram_size or 0),
                min_length=int(settings.min_length or 0),
                min_new_tokens=int(settings.min_new_tokens or 0),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the generation config is invalid: {str(error)[:200]}",
                hint="download generation_config.json again, or delete it",
            ) from error

    @property
    def reads_tokens(self) -> bool:
        """True if tokens are banned depending on those before."""
        return bool(
            self.bad_words or self.no_repeat_ngram_size or self.encoder_no_repeat_ngram_size
        )

    def context(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the decoder's tokens before the answer: the prompt, or the start token."""
        return prompt if self.start is None else (self.start,)

    def forced(self, prompt: Sequence[int], place: int, *, is_last: bool) -> int | None:
        """Return the token forced at position `place` of the answer; None if any may follow."""
        if is_last and self.forced_eos is not None:
            return self.forced_eos
        return self.forced_bos if place + len(self.context(prompt)) == 1 else None

    def banned(
        self, prompt: Sequence[int], answer: Sequence[int], stop_ids: Sequence[int], place: int
    ) -> set[int]:
        """Return the tokens that must not be at a position of the answer, by their ids.

        `answer` has the tokens before, which are only read if `reads_tokens`.
        """
        context = self.context(prompt)
        banned = set(self.suppressed)
        # The first free position: 0, or 1 if the token at 0 is forced.
        if place == (self.forced(prompt, 0, is_last=False) is not None):
            banned |= set(self.begin_suppressed)
        if len(context) + place < self.min_length or place < self.min_new_tokens:
            banned |= set(stop_ids)
        if not self.reads_tokens:
            return banned
        tokens = (*context, *answer)
        for *prefix, final_token in self.bad_words:
            is_end = not prefix and final_token in stop_ids
            if not is_end and tokens[len(tokens) - len(prefix) :] == tuple(prefix):
                banned.add(final_token)
        for source, size in (
            (tokens, self.no_repeat_ngram_size),
            (prompt, self.encoder_no_repeat_ngram_size),
        ):
            if size:
                banned |= _find_repeating(tuple(source), tokens, size)
        return banned


def _find_repeating(source: tuple[int, ...], tokens: tuple[int, ...], size: int) -> set[int]:
    """Return the tokens that, appended to `tokens`, would repeat an n-gram of `source`."""
    # With n = 3 and tokens 1 2 3 1 2: the last two tokens, 1 2, were followed by 3 before; 3 is
    # forbidden.
    suffix = tokens[len(tokens) - size + 1 :]
    starts = range(len(source) - size + 1)
    return {source[i + size - 1] for i in starts if source[i : i + size - 1] == suffix}


def _refuse_unsupported(settings: GenerationConfig) -> None:
    """Raise UsageError if an unsupported setting has an effect."""
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(settings, name, None)
        if value not in (None, neutral):
            raise UsageError(
                f"the generation config has {name} {str(value)[:80]}, which the engine doesn't "
                "support",
                hint="remove it from generation_config.json, or generate without the engine "
                "(duoka.load)",
            )


def _to_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Convert a token id, a list of ids or None to a tuple of ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(map(int, value))
