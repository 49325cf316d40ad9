"""transformers' pipeline, with texts and with a chat."""

from __future__ import annotations

from typing import Any

from transformers import pipeline


def run(model: Any, tokenizer: Any) -> list[str]:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False}
    texts = generator(["the cat", "a small dog"], batch_size=2, **options)
    chat = generator([{"role": "user", "content": "Who sang?"}], **options)
    return [
        *(found[0]["generated_text"] for found in texts),
        chat[0]["generated_text"][-1]["content"],
    ]
