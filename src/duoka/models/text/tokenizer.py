"""Load tokenizers from a checkpoint's files.

For the ChatGLM family, text that looks like a special token (``<|user|>``) is encoded as text, so
that users can't change roles by typing. Callers that pass trusted text only can request special
tokens with ``split_special_tokens=False``. `duoka.checkpoint.vocabulary` reads vocabulary files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from duoka.checkpoint.headers import read_json
from duoka.checkpoint.tokenizer_files import HINT, check_files, special_tokens
from duoka.checkpoint.vocabulary import SentencePieceModel, encoding_of, read_vocabulary
from duoka.errors import CheckpointError

_MOST_TEMPLATE_BYTES = 2**20
ENCODING = threading.RLock()
"""Held while a tokenizer encodes: whether special tokens are split is a state of it."""


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, splits: bool, adds: bool = False
) -> list[int]:
    """Encode a text, in one thread at a time.

    With `splits` special tokens in the text are encoded as text; with `adds` the tokenizer adds
    its own at the ends.
    """
    with ENCODING:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=adds, split_special_tokens=splits
        )
    return ids


def load_tokenizer(
    directory: Path,
    config: Mapping[str, Any],
    *,
    native: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
    tokenizer_class: Any = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint's directory without running the directory's code.

    A tokenizer of the ChatGLM family, published or saved, gets the class `native`. A checkpoint
    with remote code that the user trusts gets `tokenizer_class`, the imported class.
    """
    check_files(directory)
    vocabulary = directory / "tokenizer.model"
    is_native = config.get("model_type") == "chatglm"
    if is_native and vocabulary.is_file():
        return native(**_chatglm_tokenizer(vocabulary, config))
    reader: Any = tokenizer_class or (native if is_native else AutoTokenizer)
    try:
        loaded: PreTrainedTokenizerBase = reader.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, padding_side="left"
        )
    except Exception as error:
        raise CheckpointError(
            f"no tokenizer could be loaded from {directory}: {first_line(error)}", hint=HINT
        ) from error
    templates = directory / "chat_template.json"
    if loaded.chat_template is None and templates.is_file():  # older processors saved it so
        stated = read_json(templates, most_bytes=_MOST_TEMPLATE_BYTES).get("chat_template")
        loaded.chat_template = stated if isinstance(stated, str) else None
    return loaded


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; for an error without text, its type."""
    return next(filter(None, str(error).splitlines()), type(error).__name__)


def special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the id of a special token; raise CheckpointError if the tokenizer lacks the token."""
    number = tokenizer.convert_tokens_to_ids(name)
    if not isinstance(number, int) or (
        number == tokenizer.unk_token_id and name != tokenizer.unk_token
    ):
        raise CheckpointError(f"the tokenizer has no special token {name}")
    return number


def _chatglm_tokenizer(vocabulary: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `PreTrainedTokenizerFast` for a ChatGLM vocabulary file."""
    model = read_vocabulary(vocabulary)
    backend, special = encoding_of(model), special_tokens(vocabulary.parent, config, model)
    if isinstance(model, SentencePieceModel):
        prefix = ("[gMASK]", "sop")
        unknown, end = model.pieces[0][0], model.pieces[2][0]
        names = {"unk_token": unknown, "bos_token": model.pieces[1][0], "eos_token": end}
        pad = unknown
    else:
        prefix = ("[gMASK]", "<sop>")
        end = pad = "<|endoftext|>"
        names = {"eos_token": end}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.post_processor = TemplateProcessing(
        single=[*prefix, "$A"],
        pair=[*prefix, "$A", "$B", end],
        special_tokens=[(name, backend.token_to_id(name)) for name in (*prefix, end)],
    )
    return {
        "tokenizer_object": _Owned(backend),
        "pad_token": pad,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **names,
    }


class _Owned:
    """Holds a tokenizer backend, and returns the backend itself on slow deep copies."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self.backend
