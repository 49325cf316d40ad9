"""Tokenizers of which a mark begins a word, as SentencePiece's files have them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def sentencepiece_like(kind: str) -> PreTrainedTokenizerFast:
    """Pieces of which ▁ begins a word, and bytes; written as Llama 2's or T5's files have them."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁"]
    letters = "abcdefghijklmnopqrstuvwxyz():"
    words += [*letters, "▁a", "▁x", "▁r"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("▁", "x"), ("▁", "r")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), *steps, decoders.Strip(" ", 1, 0)]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
