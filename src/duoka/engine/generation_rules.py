"""Rules of a checkpoint's generation config: forbidden and forced tokens, as in `generate`.

Each rule does the same as the logits processor of transformers with its name. Sampling parameters
are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from duoka.errors import UsageError

# Other rules of `generate`, with their neutral values.
_UNKNOWN = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRules:
    """The rules of a generation config for single tokens; see `GenerationConfig` of transformers.

    `start` is the token that an encoder-decoder's answers begin with; others begin with the prompt.
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
        """Return the rules of a model, or of another generation config.

        UsageError for a rule that the engine doesn't apply.
        """
        settings: Any = model.generation_config
        try:
            if generation_config is not None:
                settings = GenerationConfig.from_dict(dict(generation_config))
            _refuse_unknown(settings)
            start = settings.decoder_start_token_id
            start = settings.bos_token_id if start is None else start
            return cls(
                start=start if model.config.is_encoder_decoder else None,
                forced_bos=settings.forced_bos_token_id,
                # Of several all are as likely to `generate`, which takes the first one.
                forced_eos=min(_ids(settings.forced_eos_token_id), default=None),
                suppressed=_ids(settings.suppress_tokens),
                begin_suppressed=_ids(settings.begin_suppress_tokens),
                bad_words=tuple(filter(None, map(_ids, settings.bad_words_ids or ()))),
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

    def context(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the tokens before an answer."""
        return prompt if self.start is None else (self.start,)

    def forced(self, prompt: Sequence[int], place: int, *, is_last: bool) -> int | None:
        """Return the forced token at a position of the answer, if any."""
        if is_last and self.forced_eos is not None:
            return self.forced_eos
        return self.forced_bos if place + len(self.context(prompt)) == 1 else None

    def banned(
        self, prompt: Sequence[int], answer: Sequence[int], stop_ids: Sequence[int]
    ) -> set[int]:
        """Return the tokens that are forbidden next."""
        context, place = self.context(prompt), len(answer)
        banned = set(self.suppressed)
        # After a token that is forced, if there is one.
        if place == (self.forced(prompt, 0, is_last=False) is not None):
            banned |= set(self.begin_suppressed)
        if len(context) + place < self.min_length or place < self.min_new_tokens:
            banned |= set(stop_ids)
        tokens = (*context, *answer)
        for *before, last in self.bad_words:
            is_end = not before and last in stop_ids
            if not is_end and tokens[len(tokens) - len(before) :] == tuple(before):
                banned.add(last)
        for source, size in (
            (tokens, self.no_repeat_ngram_size),
            (prompt, self.encoder_no_repeat_ngram_size),
        ):
            if size:
                banned |= _repeating(tuple(source), tokens, size)
        return banned


def _repeating(source: tuple[int, ...], tokens: tuple[int, ...], size: int) -> set[int]:
    """Return the tokens that would repeat an n-gram of a source at the end."""
    # Of trigrams in 1 2 3 1 2 the end 1 2 was followed by 3 before: 3 is forbidden.
    ends = tokens[len(tokens) - size + 1 :]
    starts = range(len(source) - size + 1)
    return {source[at + size - 1] for at in starts if source[at : at + size - 1] == ends}


def _refuse_unknown(settings: GenerationConfig) -> None:
    for name, neutral in _UNKNOWN.items():
        value = getattr(settings, name, None)
        if value not in (None, neutral):
            raise UsageError(
                f"the generation config has {name} {str(value)[:80]}, which the engine doesn't "
                "support",
                hint="remove it from generation_config.json, or generate without the engine "
                "(duoka.load)",
            )


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(map(int, value))
