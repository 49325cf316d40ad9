"""Losses of `duoka tune` beside those of TRL's SFTTrainer and of plain loops of transformers.

    python benchmarks/tune_beside.py text [--json FILE]     # with TRL, if it is installed
    python benchmarks/tune_beside.py vision [--json FILE]

Tiny models with random weights are trained by LoRA in float32, from the same initial adapter and on
the same samples in the same order: on 1, 2 and 3 virtual GPUs, with a process for each; by a loop
of transformers and peft in one process; and text by TRL. The vision models are LLaVA, Qwen2-VL and
GLM-4V. GLM-4V has no plain loop, because its published code needs transformers 4;
``tests/tuner/test_images.py`` compares its loss with that code's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning
from fork_server import forking_python
from image_checkpoints import write_family, write_glm4v

import duoka
from duoka import TuneSettings
from duoka.tuner.data import Batches, Dataset
from duoka.tuner.run import RunDirectory

LR, STEPS, BATCH = 5e-3, 6, 4
PLANNED: dict[str, Any] = {"batch": BATCH, "steps": STEPS, "lr": LR, "lr_schedule": "constant"}
Forward = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns logits and labels of a sample, by its number."""


def tune(
    model: Path, data: Path, gpus: int, save: Path, adapter: Path | None = None
) -> list[float]:
    """Return the losses of a run on virtual GPUs."""
    duoka.tune(
        model,
        str(data),
        f"virtual:{gpus}x256MiB",
        save=save,
        replicas=1,
        adapter=adapter,
        settings=TuneSettings(**PLANNED, warmup=0),
    )
    return tuning.losses(save)


def order_of(run: Path) -> tuple[Dataset, list[list[int]]]:
    """Return the samples of a run, and those of each step."""
    samples = Dataset.load(RunDirectory(run).samples)
    batches = Batches(samples, batch=BATCH)
    steps = (batches[number].micro_batches for number in range(STEPS))
    return samples, [[row for batch in step for (row,) in batch.rows] for step in steps]


def plain_losses(model: Any, steps: Sequence[Sequence[int]], forward: Forward) -> list[float]:
    """Train in a plain loop; return the mean loss over the trained tokens of each step."""
    parameters = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    losses = []
    for step in steps:
        total, num_tokens = torch.zeros(()), 0
        for sample in step:
            logits, labels = forward(sample)
            total = total + cross_entropy(logits[0, :-1], labels[1:], reduction="sum")
            num_tokens += int((labels[1:] != -100).sum())
        loss = total / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def inputs_of(samples: Dataset, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids [1, tokens] and labels [tokens] of a sample."""
    ids, is_trained = map(torch.tensor, samples.tokens(sample))
    return ids[None].long(), ids.long().masked_fill(~is_trained, -100)


def trl_losses(model: Path, adapter: Path, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the losses of TRL's SFTTrainer on rows in their order."""
    from datasets import Dataset as Table
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Trainer(SFTTrainer):
        """Keeps the order of the rows, and every loss in full precision."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

    turns = [row["messages"] for row in rows]
    table = Table.from_list([{"prompt": it[:-1], "completion": it[-1:]} for it in turns])
    plain = AutoModelForCausalLM.from_pretrained(model)
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out, max_steps=STEPS, per_device_train_batch_size=1,
            gradient_accumulation_steps=BATCH, learning_rate=LR, lr_scheduler_type="constant",
            warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, bf16=False, use_cpu=True,
            gradient_checkpointing=False, optim="adamw_torch", report_to="none",
            save_strategy="no", disable_tqdm=True, packing=False,
        )  # fmt: skip
        Trainer(
            model=PeftModel.from_pretrained(plain, adapter, is_trainable=True),
            args=config,
            train_dataset=table,
            processing_class=tuning.make_tokenizer(),
        ).train()
    return [sum(losses[at : at + BATCH]) for at in range(0, len(losses), BATCH)]


def text(directory: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the losses of a Llama by each way to train it."""
    model = tuning.write_model("llama", directory / "model")
    data = tuning.write_chats(directory / "chats.jsonl", BATCH * STEPS)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(3)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=modules, task_type="CAUSAL_LM")
    adapter = directory / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(adapter)
    for gpus in (1, 2, 3):
        yield f"duoka, {gpus} GPUs", tune(model, data, gpus, directory / f"run-{gpus}", adapter)
    samples, steps = order_of(directory / "run-1")
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), adapter, is_trainable=True
    )

    def forward(sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = inputs_of(samples, sample)
        return plain(input_ids=ids).logits, labels

    yield "plain loop", plain_losses(plain, steps, forward)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    in_order = [rows[samples.lines[sample] - 1] for step in steps for sample in step]
    if find_spec("trl"):
        yield "TRL SFTTrainer", trl_losses(model, adapter, in_order)


def write_pictures(directory: Path, number: int) -> Path:
    """Write rows of a question about a picture, with an answer of some letters."""
    rows = []
    for at in range(number):
        Image.effect_noise((56, 56), 90).convert("RGB").save(directory / f"{at}.png")
        turns = [
            {"role": "user", "content": f"<image>What is {at}?"},
            {"role": "assistant", "content": "red" + "!" * (at % 4)},
        ]
        rows.append({"messages": turns, "images": [f"{at}.png"]})
    path = directory / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def new_adapter(trained: Path, directory: Path) -> Path:
    """Write an adapter on the same modules as a trained one, with other initial values."""
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes((trained / "adapter_config.json").read_bytes())
    tensors = load_file(trained / "adapter_model.safetensors")
    torch.manual_seed(3)
    for name in sorted(tensors):
        std = 0.1 if "lora_A" in name else 0.0
        tensors[name] = std * torch.randn(tensors[name].shape)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def vision(family: str, directory: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the losses of a vision-language model by each way to train it."""
    write = write_glm4v if family == "glm-4v" else lambda path: write_family(family, path)
    model = write(directory / "model")
    data = write_pictures(directory, 2 * BATCH)
    tune(model, data, 1, directory / "names")
    adapter = directory / "names" / "adapter"
    if family != "glm-4v":  # one of fused modules has blocks of zeros, which must stay
        adapter = new_adapter(adapter, directory / "adapter")
    for gpus in (1, 2, 3):
        yield f"duoka, {gpus} GPUs", tune(model, data, gpus, directory / f"run-{gpus}", adapter)
    if family == "glm-4v":
        return
    samples, steps = order_of(directory / "run-1")
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")

    def forward(sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = inputs_of(samples, sample)
        image = Image.open(directory / f"{samples.lines[sample] - 1}.png")
        pictures = processor(images=[image], return_tensors="pt")
        types = {"mm_token_type_ids": ids.eq(base.config.image_token_id).long()}
        more = types if family == "qwen2_vl" else {}
        return plain(input_ids=ids, **pictures, **more).logits, labels

    yield "plain loop", plain_losses(plain, steps, forward)


def main() -> int:
    """Print a table of the losses, and the largest difference to those on one GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("text", "vision"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kind, rows = options.kind, []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        sys.executable = str(forking_python(root / "forks", os.getpid()))  # to start quickly
        for family in ("llava", "qwen2_vl", "glm-4v") if kind == "vision" else ("llama",):
            directory = root / family
            directory.mkdir()
            ways = text(directory) if kind == "text" else vision(family, directory)
            expected: list[float] = []
            for way, losses in ways:
                expected = expected or losses
                difference = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
                rows.append({"model": family, "way": way, "losses": losses})
                numbers = " | ".join(f"{loss:.6f}" for loss in losses)
                print(f"| {family} | {way} | {numbers} | {difference:.1e} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
