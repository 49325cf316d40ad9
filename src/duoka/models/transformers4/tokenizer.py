"""The base class of tokenizers in transformers 4."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizer
from transformers.utils.generic import to_py_obj

_OTHER_NAMES = {
    "additional_special_tokens": "extra_special_tokens",
    "additional_special_tokens_ids": "extra_special_tokens_ids",
    "_additional_special_tokens": "extra_special_tokens",
}


class _Made(type):
    """Adds special tokens after a tokenizer's construction: its constructor may be too early."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        tokenizer = super().__call__(*args, **kwargs)
        tokenizer.is_made = True
        added = tokenizer.get_added_vocab()
        missing = [token for token in tokenizer.all_special_tokens if token not in added]
        tokenizer.add_tokens(missing, special_tokens=True)
        return tokenizer


class LegacyTokenizer(PreTrainedTokenizer, metaclass=_Made):
    """The base class of 4.x, whose constructor runs before the vocabulary is set."""

    is_made = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, adapted in (("_pad", _accept_padding_side), ("tokenize", _adapt_tiktoken)):
            if name in vars(cls):
                setattr(cls, name, adapted(vars(cls)[name]))

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Add tokens; before 4.34 the constructor added none."""
        try:
            return super()._add_tokens(new_tokens, special_tokens=special_tokens)
        except Exception:
            if self.is_made:
                raise
            return 0  # the vocabulary isn't set yet: `_Made` adds the tokens later

    def __getattr__(self, name: str) -> Any:
        inherited: Any = super()  # not annotated there
        value = inherited.__getattr__(_OTHER_NAMES.get(name, name))
        if not isinstance(value, property):
            return value
        if self.is_made:
            raise AttributeError(name)
        return getattr(inherited, name)  # the property needs the vocabulary

    def __setattr__(self, name: str, value: Any) -> None:
        inherited: Any = super()
        inherited.__setattr__(_OTHER_NAMES.get(name, name), value)

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """The special tokens by purpose, with additional tokens as until 5.0."""
        extra = self.extra_special_tokens
        return super().special_tokens_map | ({"additional_special_tokens": extra} if extra else {})

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Decode ids; skip ids beyond the vocabulary, which larger embeddings can generate."""
        ids = to_py_obj(token_ids)
        if isinstance(ids, list):
            size, added = self.vocab_size, self._added_tokens_decoder
            ids = [n for n in ids if isinstance(n, list) or n < size or n in added]
        return super().decode(ids, *args, **kwargs)

    def encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        """Encode a text, or several; removed in 5.0."""
        return self(*args, **kwargs)

    batch_encode_plus = encode_plus


def _accept_padding_side(pad: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `_pad` written before 4.45 to accept, and ignore, `padding_side`."""
    if "padding_side" in inspect.signature(pad).parameters:
        return pad

    @functools.wraps(pad)
    def padded(*args: Any, padding_side: str | None = None, **kwargs: Any) -> Any:
        return pad(*args, **kwargs)

    return padded


def _adapt_tiktoken(tokenize: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Wrap a `tokenize` that uses tiktoken to translate `split_special_tokens`."""
    if "tiktoken" not in tokenize.__globals__:
        return tokenize

    @functools.wraps(tokenize)
    def tokenized(self: LegacyTokenizer, text: str, **kwargs: Any) -> list[str]:
        are_text = kwargs.pop("split_special_tokens", self.split_special_tokens)
        special = {"allowed_special": set() if are_text else "all", "disallowed_special": ()}
        special |= {name: kwargs[name] for name in special.keys() & kwargs.keys()}
        return tokenize(self, text, **special)

    return tokenized
