"""Plans, and what is said where nothing fits: published and small models, fleets, workloads.

`structure.txt` has the numbers and a hash of the whole JSON, `texts.txt` what people read.
`reasons.txt` has explanations, exports, comparisons and copies.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import chatglm_files
import published
import tiny
from image_checkpoints import GLM_4V_9B

import duoka

from . import records
from .programs import duoka as run

_PROCESSES = 2
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
QUANTIZED = ("gptq", "awq", "nf4", "fp8", "fp8 experts", "pack")
MAP = {"transformer.embedding": 0, "transformer.encoder": 1, "transformer.output_layer": 0,
       "transformer.rotary_pos_emb": 1}  # fmt: skip
EXPORTS = ("accelerate", "vllm", "sglang", "llama.cpp")

# A model, and options that go with each of a list of fleets.
CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Answers, one GPU to eight: equal and unequal, roomy and tight.
    ("chatglm2-6b", "--context 4K", ("24GiB", "8GiB,8GiB", "4GiB,6GiB,8GiB", "8x3GiB")),
    ("chatglm2-6b", "--context 4K --use-all", ("24GiB,24GiB", "12GiB,6GiB,6GiB", "8x4GiB")),
    ("chatglm2-6b-32k", "--context 32K", ("24GiB", "8GiB,8GiB", "10GiB,6GiB")),
    ("chatglm2-6b-32k", "--context 32K --batch 2", ("24GiB", "12GiB,12GiB")),
    ("chatglm3-6b", "--context 8K",
     ("24GiB", "8GiB,8GiB", "12GiB,6GiB", "6x3GiB", "5GiB,5GiB,5GiB")),
    ("chatglm3-6b", "--context 2K --batch 8", ("24GiB", "12GiB,12GiB", "10GiB,8GiB,6GiB")),
    ("chatglm3-6b", "--context 8K --prefill-chunk none", ("24GiB", "9GiB,9GiB")),
    ("chatglm3-6b", "--context 8K --prefill-chunk 512", ("16GiB", "8GiB,8GiB")),
    ("chatglm3-6b", "--context 4K --dtype float32", ("48GiB", "16GiB,16GiB")),
    ("chatglm3-6b", "--context 4K --new-tokens 2K", ("16GiB", "2xRTX3060")),
    ("chatglm3-6b-128k", "--context 128K --new-tokens 256", ("24GiB", "16GiB,8GiB", "4x8GiB")),
    ("chatglm3-6b-128k", "--context 64K", ("24GiB", "2x12GiB")),
    ("glm-4-9b-chat", "--context 8K",
     ("24GiB", "12GiB,8GiB", "24GiB,12GiB,8GiB", "8x4GiB", "3x8GiB")),
    ("glm-4-9b-chat", "--context 128K --new-tokens 256", ("24GiB,24GiB", "4x16GiB")),
    ("glm-4-9b-chat", "--context 8K --batch 4", ("24GiB", "16GiB,16GiB", "2xRTX4090")),
    ("llama-8b", "--context 8K", ("24GiB", "12GiB,8GiB", "8x4GiB")),
    ("llama-8b", "--context 8K --batch 8 --use-all", ("24GiB,24GiB", "4x12GiB")),
    ("chatglm3-6b", "--context 2K", ("16GiB", "7x4GiB", "RTX4080", "RTX5090,RTX3060")),
    ("glm-4-9b-chat", "--context 16K", ("32GiB", "3x10GiB", "A100-80GB-SXM", "2xL4")),
    ("glm-4-9b-chat", "--context 4K --batch 2 --use-all", ("5x8GiB", "24GiB,12GiB,8GiB,4GiB")),
    ("llama-8b", "--context 4K", ("RTX4090", "2xA10", "2xRTX3060")),
    ("chatglm3-6b-128k", "--context 32K --batch 4", ("2x24GiB", "RTX4090+RTX3090")),
    ("chatglm2-6b", "--context 8K --new-tokens 1K", ("16GiB", "3xRTX3060")),
    # Cards whose speed is known, and what is optimised.
    ("glm-4-9b-chat", "--context 8K --objective headroom", ("2xRTX4090+1xRTX3090", "3xRTX3060")),
    ("glm-4-9b-chat", "--context 8K --objective latency", ("2xRTX4090+1xRTX3090", "3xRTX3060")),
    ("glm-4-9b-chat", "--context 8K --objective throughput --batch 4",
     ("2xRTX4090+1xRTX3090", "3xRTX3060")),
    ("glm-4-9b-chat", "--context 4K --use-all --objective latency", ("2xRTX4090+1xRTX3090",)),
    ("glm-4-9b-chat", "--context 4K --use-all --objective throughput", ("4xRTX3090",)),
    ("chatglm3-6b", "--context 4K",
     ("RTX4090", "2xRTX2080Ti", "1xA100-40GB-PCIe+1xRTX3090", "2xV100-16GB-PCIe")),
    ("chatglm3-6b", "--context 4K --objective latency --use-all", ("RTX4090+RTX3060", "2xT4")),
    ("glm-4-9b-chat", "--context 4K --strategy balanced", ("3x16GiB", "24GiB,12GiB,8GiB")),
    ("glm-4-9b-chat", "--context 4K --strategy sequential", ("3x16GiB", "8GiB,24GiB")),
    # Requests that come and go.
    ("chatglm3-6b", "--serve", ("24GiB", "24GiB,12GiB", "RTX4090")),
    ("chatglm3-6b", "--serve --cache int8 --sequences 8", ("16GiB", "2xRTX3090")),
    ("chatglm3-6b", "--serve --sequences 64 --context 2K", ("24GiB", "2x12GiB")),
    ("chatglm3-6b", "--serve --objective pages --use-all", ("12GiB,8GiB", "4x6GiB")),
    ("glm-4-9b-chat", "--serve --context 8K", ("24GiB,12GiB", "2xRTX4090")),
    ("glm-4-9b-chat", "--serve --objective throughput --use-all", ("2xRTX4090+1xRTX3090",)),
    ("llama-8b", "--serve --context 4K --sequences 32", ("24GiB", "2xRTX3090")),
    # Training.
    ("chatglm3-6b", "--train lora --context 2K", ("24GiB", "12GiB,12GiB")),
    ("chatglm3-6b", "--train lora --context 2K --checkpointing", ("16GiB", "8GiB,8GiB")),
    ("chatglm3-6b", "--train lora --lora-rank 64 --lora-target query_key_value --context 1K",
     ("24GiB", "8GiB,10GiB")),
    ("chatglm3-6b", "--train qlora --context 2K", ("16GiB", "8GiB,8GiB")),
    ("chatglm3-6b", "--train full --context 1K --checkpointing", ("4x24GiB", "2x80GiB")),
    ("chatglm3-6b", "--train full --context 1K --optimizer adafactor", ("3x24GiB",)),
    ("chatglm3-6b", "--train full --context 1K --optimizer adamw8bit --use-all",
     ("4x24GiB", "2xA100-40GB-PCIe+2xRTX3090")),
    ("chatglm3-6b", "--train full --context 1K --batch 1", ("4x40GiB",)),
    ("glm-4-9b-chat", "--train lora --checkpointing --context 2K --use-all",
     ("24GiB,16GiB", "3x16GiB", "2xRTX4090")),
    ("glm-4-9b-chat", "--train lora --checkpointing --context 2K --batch 4 "
     "--schedule gpipe --use-all", ("24GiB,16GiB",)),
    ("glm-4-9b-chat", "--train lora --packing --context 4K --checkpointing",
     ("2x24GiB",)),
    ("glm-4-9b-chat", "--train lora --batch 2 --micro-batch 2 --context 1K "
     "--checkpointing",
     ("2x24GiB",)),
    # Smaller weights and caches.
    ("chatglm3-6b", "--quantize int8 --context 4K", ("12GiB", "4GiB,6GiB")),
    ("chatglm3-6b", "--quantize int4 --context 4K", ("8GiB", "3GiB,3GiB")),
    ("chatglm3-6b", "--quantize nf4 --context 4K", ("8GiB",)),
    ("chatglm3-6b", "--quantize auto --context 4K", ("16GiB", "8GiB", "6GiB")),
    ("chatglm3-6b", "--cache int8 --context 8K", ("16GiB", "8GiB,8GiB")),
    ("glm-4-9b-chat", "--quantize auto --context 8K", ("12GiB", "24GiB", "4GiB,6GiB")),
    ("gptq", "--context 256", ("virtual:1x64MiB", "virtual:2x32MiB")),
    ("awq", "--context 256", ("virtual:2x32MiB",)),
    ("nf4", "--context 256", ("virtual:2x32MiB",)),
    ("fp8", "--context 256", ("virtual:2x32MiB",)),
    ("fp8-experts", "--context 256", ("virtual:2x32MiB",)),
    ("pack", "--context 256", ("virtual:2x32MiB",)),
    ("mxfp4", "--context 256", ("virtual:2x32MiB",)),
    # Pictures.
    ("glm-4v-9b", "--images 1 --image-size 1120x1120 --context 4K",
     ("2x24GiB", "5xRTX3090", "16GiB,16GiB,8GiB")),
    ("glm-4v-9b", "--images 2 --image-size 1120x1120 --vision-batch 1 --context 8K", ("2x24GiB",)),
    ("glm-4v-9b", "--context 2K", ("2x16GiB",)),
    ("tower", "--images 1 --image-size 112x112 --context 512",
     ("virtual:2x64MiB", "virtual:1x96MiB")),
    # Held by hand, left free, kept on the CPU; the most that fits; copies.
    ("glm-4-9b-chat", "--context 4K --pin lm_head=cuda:1", ("24GiB,12GiB",)),
    ("glm-4-9b-chat", "--context 4K --pin model.layers.0=cuda:1 --reserve cuda:0=4GiB",
     ("24GiB,12GiB",)),
    ("glm-4-9b-chat", "--context 4K --reserve cuda:0=2GiB", ("2x12GiB", "24GiB")),
    ("glm-4-9b-chat", "--context 4K --offload", ("12GiB", "4GiB,6GiB", "RTX4070")),
    ("glm-4-9b-chat", "--max-context", ("12GiB,8GiB",)),
    ("chatglm3-6b", "--max-context --quantize int4", ("8GiB",)),
    ("chatglm3-6b", "--max-batch --context 2K", ("24GiB", "12GiB,12GiB")),
    ("chatglm3-6b", "--serve --max-batch --context 2K", ("24GiB",)),
    ("chatglm3-6b", "--device-map map.json --context 4K", ("24GiB,24GiB", "8GiB,16GiB")),
    ("chatglm3-6b", "--device-map balanced --context 4K", ("2x12GiB",)),
    ("chatglm3-6b", "--device-map incomplete.json --context 4K", ("24GiB,24GiB",)),
    # Families of transformers, small.
    *((name, "--context 1K", ("virtual:2x128MiB", "virtual:64MiB,96MiB,64MiB"))
      for name in ("glm", "llama", "tied", "window", "experts", "bloom", "latent")),
    ("mamba2", "--context 512", ("virtual:2x128MiB",)),
    ("hybrid", "--context 512", ("virtual:2x128MiB",)),
    ("pair", "--context 512", ("virtual:2x128MiB",)),
    ("llama", "--context 1K --serve --sequences 4", ("virtual:2x128MiB",)),
    ("experts", "--context 512 --train full --batch 4 --schedule gpipe",
     ("virtual:2x512MiB",)),
    ("tied", "--context 512 --train lora --use-all", ("virtual:2x64MiB",)),
    # What doesn't fit, and what would.
    ("chatglm3-6b", "--context 4K", ("8GiB", "2GiB,2GiB")),
    ("chatglm3-6b", "--context 32K --batch 16", ("24GiB",)),
    ("chatglm3-6b-128k", "--context 128K", ("12GiB",)),
    ("glm-4-9b-chat", "--context 8K", ("12GiB", "8GiB,8GiB", "RTX3090+RTX3060,4GiB")),
    ("glm-4-9b-chat", "--serve --context 8K", ("16GiB",)),
    ("glm-4-9b-chat", "--train lora --context 4K", ("24GiB",)),
    ("chatglm3-6b", "--train full --context 1K", ("4x16GiB",)),
    ("chatglm3-6b", "--context 4K --pin lm_head=cuda:1", ("16GiB,512MiB",)),
    # What is wrong.
    ("chatglm3-6b", "--objective throughput", ("8x4GiB",)),
    ("chatglm3-6b", "--context 1M", ("24GiB",)),
    ("chatglm3-6b", "--pin nothing=cuda:0", ("24GiB",)),
    ("chatglm3-6b", "--pin lm_head=cuda:7", ("24GiB",)),
    ("chatglm3-6b", "--images 1", ("24GiB",)),
    ("chatglm3-6b", "--serve --batch 4", ("24GiB",)),
    ("chatglm3-6b", "--lora-rank 8", ("24GiB",)),
    ("chatglm3-6b", "--context 4K", ("RTX9999", "24GB,,8")),
)  # fmt: skip
# Of these plans everything else is asked, too.
EXPLAINED = (
    "glm-4-9b-chat --context 8K 12GiB,8GiB",
    "glm-4-9b-chat --context 8K --objective latency 2xRTX4090+1xRTX3090",
    "glm-4-9b-chat --context 8K --objective throughput --batch 4 3xRTX3060",
    "chatglm3-6b --serve 24GiB,12GiB",
    "chatglm3-6b --train lora --context 2K 12GiB,12GiB",
    "chatglm3-6b --quantize auto --context 4K 8GiB",
    "glm-4v-9b --images 1 --image-size 1120x1120 --context 4K 2x24GiB",
    "glm-4-9b-chat --context 4K --offload 12GiB",
    "llama-8b --context 8K 8x4GiB",
)
REPLICAS = (
    ("chatglm3-6b", "--context 4K --replicas auto", "4x16GiB"),
    ("chatglm3-6b", "--context 4K --replicas 2 --use-all", "24GiB,8GiB,8GiB"),
    ("glm-4-9b-chat", "--serve --context 4K --replicas auto", "5xRTX3090"),
    ("glm-4-9b-chat", "--context 4K --replicas 3", "2x24GiB"),
)


def write(made: Path) -> None:
    """Make the plans: models in turn, by a process for each core of a small machine."""
    root = Path.cwd() / "plans"
    _write_models(root)
    os.chdir(root)
    models = Counter(model for model, _, _ in cases()).most_common()
    structures, texts = {}, {}
    with ProcessPoolExecutor(_PROCESSES, get_context("fork")) as pool:
        for of_model in pool.map(_plans_of, [model for model, _ in models]):
            for name, (structure, text) in of_model.items():
                structures[name], texts[name] = structure, text
            records.write(made / "structure.txt", structures)
            records.write(made / "texts.txt", texts)
        parts = pool.map(_reasons_of, _asked())
        records.write(made / "reasons.txt", dict(chain.from_iterable(parts)))


def _plans_of(model: str) -> dict[str, tuple[str, str]]:
    """The plans of a model."""
    found = {}
    for each, options, fleet in cases():
        name = f"{model} {options} {fleet}"
        if each == model:
            assert name not in found, name
            start = time.process_time()
            found[name] = plan(model, options, fleet, _file(name))
            seconds = time.process_time() - start
            sys.stderr.write(f"{name}: {seconds:.1f} s\n")
            sys.stderr.flush()
    return found


def _asked() -> Iterator[tuple[str, ...]]:
    """What else is asked of plans that are made."""
    found = [name for name in EXPLAINED if records.is_wanted(name)]
    yield from (("explain", name) for name in found)
    yield from (("copies", *case) for case in REPLICAS if records.is_wanted(" ".join(case)))


def _file(name: str) -> Path:
    return Path(f"{records.digest(name)}.plan")


def cases() -> Iterator[tuple[str, str, str]]:
    """Model, options and fleet of each plan."""
    for model, options, fleets in CASES:
        for fleet in fleets:
            if records.is_wanted(f"{model} {options} {fleet}"):
                yield model, options, fleet


def _write_models(root: Path) -> None:
    chatglm_files.write_all(_made(root))
    configs = {path.stem: path for path in (root / "configs").glob("*.json")}
    for name, path in configs.items():
        path.rename(_made(root / name) / "config.json")
    others = {**tiny.CONFIGS, "llama-8b": LLAMA, "glm-4v-9b": GLM_4V_9B}
    for name, config in others.items():
        (_made(root / name) / "config.json").write_text(json.dumps(config))
    for name in QUANTIZED:
        published.write(root / name.replace(" ", "-"), name)
    published.write_mxfp4(root / "mxfp4")
    (root / "map.json").write_text(json.dumps(MAP))
    (root / "incomplete.json").write_text(json.dumps({"transformer.embedding": 0, "lm_heed": 1}))


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def plan(model: str, options: str, fleet: str, file: Path) -> tuple[str, str]:
    """The numbers of a plan and its text, or of a refusal."""
    words = shlex.split(options)
    done = run("plan", f"./{model}", "--gpus", fleet, *words, "--json", "--save", file)
    said = _told(done.err.replace(f"saved to {file}\n", ""))
    if done.code:
        found = json.loads(done.out) if done.out else {}
        return f"exit {done.code}\n{refused(found)}", said
    content = json.loads(_told(file.read_text()))
    shown = duoka.Plan.load(file).format_table()
    return described(content), said + _told(shown)


def described(content: dict[str, Any]) -> str:
    """A plan in lines."""
    rest = dict(content)
    entries = rest.pop("placement")["entries"]
    fleet, forecast = rest.pop("fleet"), dict(rest.pop("forecast"))
    request = rest.pop("request")
    asked = {**request, "workload": _without_same(request["workload"], rest["workload"])}
    lines = [f"{name} {_line(rest.pop(name))}" for name in ("objective", "value", "bound")]
    lines.append(f"binding {rest.pop('binding_device')}")
    lines.append(f"workload {_line(rest.pop('workload'))}")
    for row in forecast.pop("devices"):
        placed = ranges([name for name, device in entries if device == row["device"]])
        lines.append(f"{row['device']}: {placed}")
        lines.append(f"  {_line(row)}")
    hosted = ranges([name for name, device in entries if device == "cpu"])
    lines += [f"cpu: {hosted}"] if hosted else []
    lines.append(f"forecast {_line(forecast)}")
    lines += [f"why {_line(reason)}" for reason in rest.pop("why")]
    lines.append(f"asked {_line(asked)}")
    for name in ("format", "version", "source", "model", "fingerprint"):
        rest.pop(name)
    lines.append(f"rest {_line(rest)}")
    lines.append(f"fleet {len(fleet['devices'])} devices {records.digest(fleet)}")
    lines.append(f"placement {records.digest(entries)}")
    lines.append(f"plan {records.digest(content)}")
    return "\n".join(lines)


def refused(found: dict[str, Any]) -> str:
    """The numbers of a refusal in lines; its words are elsewhere."""
    ways = found.pop("ways_out", [])
    found.pop("error", None)
    lines = [f"{name} {_line(value)}" for name, value in found.items()]
    for way in ways:
        lines.append("way " + _line({k: v for k, v in way.items() if k not in ("text", "loses")}))
    return "\n".join(lines)


def _without_same(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if others.get(name, ...) != value}


def _line(value: Any) -> str:
    """JSON data in a line, without what is empty, and without quotes."""
    value = records.rounded(value, 9)
    if isinstance(value, dict):
        said = {k: v for k, v in value.items() if v not in (None, "", 0, False, [], {})}
        return "{" + ", ".join(f"{name}={_line(item)}" for name, item in said.items()) + "}"
    if isinstance(value, list):
        return "[" + " ".join(map(_line, value)) + "]"
    return str(value)


def ranges(names: list[str]) -> str:
    """Names in their order, those that count upwards as a range."""
    parts: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if parts and number.isdecimal() and parts[-1][-1] == f"{stem}.{int(number) - 1}":
            parts[-1].append(name)
        else:
            parts.append([name])
    return ", ".join(
        part[0] if len(part) == 1 else f"{part[0]}-{part[-1].rpartition('.')[2]}" for part in parts
    )


def _reasons_of(asked: tuple[str, ...]) -> list[tuple[str, str]]:
    kind, *words = asked
    kinds = {"explain": explained, "copies": copies}
    return list(kinds[kind](*words))


def explained(name: str) -> Iterator[tuple[str, str]]:
    """Why a saved plan is so, and how other tools take it."""
    file = _file(name)
    done = run("plan", "--plan", file, "--explain", "--json")
    found = json.loads(_told(done.out)) if not done.code else {}
    shown = run("plan", "--plan", file, "--explain")
    text = f"exit {done.code} {records.digest(found)}\n{shown.out}{shown.err}"
    yield f"explain {name}", _told(text)
    for tool in EXPORTS:
        done = run("plan", "--plan", file, "--export", tool)
        text = f"exit {done.code}\n{done.out}{done.err}"
        yield f"export {tool} {name}", records.shortened(_told(text))


def copies(model: str, options: str, fleet: str) -> Iterator[tuple[str, str]]:
    """Plans of several copies of a model."""
    words = ("plan", f"./{model}", "--gpus", fleet, *shlex.split(options))
    done, data = run(*words), run(*words, "--json")
    found = json.loads(_told(data.out)) if data.out else {}
    text = f"exit {done.code} {records.digest(found)}\n{done.out}{done.err}"
    yield f"{model} {options} {fleet}", _told(text)


def _told(text: str) -> str:
    """Text of a run, in which the directory has another name."""
    return records.normalised(text, plans=Path.cwd())
