"""What quantized weights take while they are loaded, and what they cost in quality.

    python benchmarks/quantize.py load      # GLM-4's layers, random weights
    python benchmarks/quantize.py quality   # the demo's model, trained on Python's own manual

The first writes a gigabyte into a temporary directory, and loads it in a process of its own for
each row. On virtual GPUs the peak is counted by their allocator; on the processor it is the
process's own memory beside mapped files (RssAnon).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from duoka import Checkpoint, Placement, virtual
from duoka.hardware.fleet import Fleet
from duoka.models import build
from duoka.models.conversion import published_tensors
from duoka.models.quantization import num_bytes, quantize_model
from duoka.models.text.tokenizer import load_tokenizer
from duoka.runtime.load import load_weights
from duoka.tools.bench.quality import Windows, measure_quality
from duoka.tools.demo.checkpoint import CONFIG, fresh_model, train_vocabulary, write_weights

MIB = 2**20
GLM4: dict[str, Any] = {
    "model_type": "glm",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "vocab_size": 8192,  # of 151552: neither embeddings nor the head are quantized
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
FORMS = ("none", "int8", "int4", "nf4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("load", "quality"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        if options.part == "load":
            _load(Path(scratch), options.layers)
        else:
            _quality(Path(scratch), options.steps, options.tokens)


# ── loading ──


def _load(directory: Path, layers: int) -> None:
    _write(directory, {**GLM4, "num_hidden_layers": layers})
    size = Checkpoint.open(directory).weight_bytes or 0
    print(f"{layers} layers of GLM-4-9B, {size / MIB:.0f} MiB in bfloat16")
    given = torch.randint(0, 8192, (1, 16))
    right: Tensor | None = None
    print("device  weights  seconds  held MiB  peak MiB  above  error of logits")
    for form in FORMS:
        for device in ("vgpu:0", "cpu"):
            # What a row before has left to the process's allocator would be counted as there.
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
                row = process.submit(_loaded, directory, form, device, given)
                seconds, held, peak, logits = row.result()
            right = logits if right is None else right
            error = float((logits - right).norm() / right.norm())
            print(
                f"{device:7} {form:7} {seconds:8.1f} {held / MIB:9.0f} {peak / MIB:9.0f} "
                f"{(peak - held) / MIB:6.0f}  {error:.4f}",
                flush=True,
            )


def _write(directory: Path, config: dict[str, Any]) -> None:
    """Random weights, as wide as trained ones are; one file for each layer."""
    (directory / "config.json").write_text(json.dumps(config))
    plain = published_tensors(build(config, dtype=torch.bfloat16))
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in plain.items():
        scale = 1.0 if name.endswith("norm.weight") else tensor.shape[-1] ** -0.5
        made = torch.randn(tensor.shape, dtype=torch.bfloat16) * scale
        file = (
            f"model-{len(files) if 'q_proj.weight' in name else max(len(files) - 1, 0)}.safetensors"
        )
        files.setdefault(file, {})[name] = made
    index = {name: file for file, held in files.items() for name in held}
    for file, held in files.items():
        save_file(held, directory / file)
    text = json.dumps({"weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def _loaded(
    directory: Path, form: str, device: str, given: Tensor
) -> tuple[float, int, int, Tensor]:
    """Seconds, bytes that stay, bytes at the peak, and logits."""
    checkpoint = Checkpoint.open(directory)
    with virtual.gpus([None], data="cpu") as world, _anonymous() as seen:
        model = build(checkpoint.config, dtype=torch.bfloat16)
        if form != "none":
            quantize_model(model, form)  # type: ignore[arg-type]
        gc.collect()
        before, started = seen.now(), time.perf_counter()
        seen.restart()
        load_weights(model, checkpoint, Placement(entries=(("", device),)))
        seconds, peak = time.perf_counter() - started, seen.peak - before
        held = sum(num_bytes(each) for each in (*model.parameters(), *model.buffers()))
        if device != "cpu":
            peak = world.max_memory_allocated(0)
        with torch.no_grad():
            logits = model(given.to(device)).logits.float().cpu()
    return seconds, held, peak, logits


class _Seen:
    """The most memory that this process had, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.peak = 0
        self.ended = threading.Event()

    def now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def restart(self) -> None:
        self.peak = 0

    def watch(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self.now())


@contextmanager
def _anonymous() -> Iterator[_Seen]:
    seen = _Seen()
    thread = threading.Thread(target=seen.watch)
    thread.start()
    try:
        yield seen
    finally:
        seen.ended.set()
        thread.join()


# ── quality ──


def _quality(directory: Path, steps: int, tokens: int) -> None:
    """Train on most of the manual, measure on the rest."""
    text = "\n".join(topics[name] for name in sorted(topics))
    cut = int(len(text) * 0.95)
    held_out = directory / "held-out.txt"
    held_out.write_text(text[cut:])
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.model").write_bytes(train_vocabulary(text[:cut].splitlines()))
    tokenizer = load_tokenizer(directory, CONFIG)
    ids = torch.tensor(tokenizer.encode(text[:cut], add_special_tokens=False))
    model = fresh_model(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(step / 20, 1.0, max(1 - step / steps, 0.05))
        starts = torch.randint(0, len(ids) - 129, (4,))
        rows = torch.stack([ids[start : start + 129] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.eval()
    write_weights(directory, CONFIG, model)
    found = measure_quality(
        Checkpoint.open(directory),
        held_out,
        Fleet.parse("virtual:2GiB"),
        dtype="float32",
        forms=("int8", "int4", "nf4"),
        windows=Windows(context_tokens=256, most_tokens=tokens),
    )
    print(f"{found.scored_tokens} tokens held out of Python's manual, {steps} steps of training")
    for score in found.scores:
        more = score.perplexity / found.scores[0].perplexity - 1
        share = score.weight_bytes / found.scores[0].weight_bytes
        print(
            f"{score.weights:8} {score.weight_bytes / MIB:6.1f} MiB ({share:.0%}) "
            f"{score.perplexity:8.3f} {more:+.2%}"
        )


if __name__ == "__main__":
    main()
