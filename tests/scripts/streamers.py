"""Answers as they come: printed by one streamer, read from another in a thread."""

from __future__ import annotations

import contextlib
import io
from threading import Thread
from typing import Any

from transformers import TextIteratorStreamer, TextStreamer


def run(model: Any, tokenizer: Any) -> list[str]:
    inputs = tokenizer("the cat sat on", return_tensors="pt").to(model.device)
    options = {"max_new_tokens": 8, "do_sample": False}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.generate(**inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **options)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, "streamer": streamer, **options})
    thread.start()
    pieces = "".join(streamer)
    thread.join()
    return [printed.getvalue().strip(), pieces]
