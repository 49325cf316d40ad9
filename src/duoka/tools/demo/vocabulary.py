"""A sentencepiece model as ChatGLM3's is: BPE, byte fallback, the same control pieces."""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece

NUM_PIECES = 1500


def train_vocabulary(texts: Iterable[str]) -> bytes:
    """Learn the pieces of some texts; return the content of ``tokenizer.model``."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=NUM_PIECES,
        byte_fallback=True,
        split_digits=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
