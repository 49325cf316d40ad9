from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from progress import without_progress
from transformers import MambaConfig

import duoka
from duoka.cli.options import ModelOptions, PlanOptions
from duoka.cli.planning import find_plan, find_plan_for_requests, find_plan_to_answer
from duoka.errors import ModelError
from duoka.models import from_checkpoint

from .conftest import GPUS, SIZES, Program


def test_only_the_answer_goes_to_the_standard_output(
    tiny: Path, process: Program, program: Program
) -> None:
    done = process("generate", tiny, *GPUS, *SIZES, "--prompt", "什么是设备映射？")
    assert done.returncode == 0
    lines = without_progress(done.stderr).splitlines()
    assert lines[0] == "ChatGLMForCausalLM on vgpu:0"
    assert [line.split()[0] for line in lines if line.startswith(" vgpu")] == ["vgpu:0"]
    assert re.search(r"first token after .* then .* tokens/s", done.stderr)
    told = program("generate", tiny, *GPUS, *SIZES, "-p", "什么是设备映射？", "--json")
    data = json.loads(told.stdout)
    (answer,) = data["answers"]
    (peaks,), (forecast,) = data["measured"]["devices"], data["measured"]["forecast"]
    assert 0 < peaks["allocated_bytes"] <= forecast["allocated_bytes"]
    assert 0 < peaks["reserved_bytes"] <= forecast["reserved_bytes"]
    assert data["measured"]["context_tokens"] == answer["prompt_tokens"] + 32
    assert data["measured"]["tokens_per_second"] > 0
    assert done.stdout.strip() == answer["text"]
    assert answer["prompt"] == "什么是设备映射？"


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ((), "paged"),
        (("--cache", "int8"), "paged-int8"),
        (("--cache", "dynamic"), "dynamic"),
        (("--offload",), "dynamic"),
    ],
)
def test_pages_for_the_prompts_given(tiny: Path, options: tuple[str, ...], cache: str) -> None:
    given = PlanOptions(
        gpus="virtual:2x64MiB", context="96", new_tokens="32", batch=3,
        cache=options[1] if len(options) > 1 else None, offload=options == ("--offload",),
    )  # fmt: skip
    plan, _ = find_plan_to_answer(ModelOptions(model=str(tiny)), given)
    assert plan.workload.cache == cache
    assert plan.workload.pages == (18 if "paged" in cache else None)  # 3 x 96 tokens, 16 a page


@pytest.mark.parametrize("cache", [None, "int8", "paged", "paged-int8"])
def test_requests_of_a_file_fill_the_memory_with_pages(tiny: Path, cache: str | None) -> None:
    given = PlanOptions(gpus="virtual:64MiB", context="96", new_tokens="32", cache=cache)
    model = ModelOptions(model=str(tiny))
    plan, _, why_not = find_plan_for_requests(model, given, requests=3, batch=2)
    assert not why_not
    assert plan.workload.batch == 3
    assert plan.workload.pages is not None
    assert plan.workload.pages > 3 * 6
    assert plan.workload.has_int8_cache == ("int8" in str(cache))


def test_a_model_without_pages_has_a_cache_per_prompt(tmp_path: Path) -> None:
    config = MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=99, architectures=["MambaForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    model = ModelOptions(model=str(tmp_path))
    given = PlanOptions(gpus="64MiB", context="96", new_tokens="32", cache="paged")
    plan, _ = find_plan(model, given, replacement_cache="dynamic")
    assert (plan.workload.cache, plan.workload.pages) == ("dynamic", None)
    with pytest.raises(ModelError, match="paged KV cache"):
        find_plan(model, given)


@pytest.mark.parametrize(
    ("command", "stdin"), [(("generate", "-p", "What is NVLink?"), ""), (("chat",), "hello\n")]
)
def test_a_command_opens_each_part_of_a_model_once(
    command: tuple[str, ...],
    stdin: str,
    tiny: Path,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program(*command, tiny, *GPUS, *SIZES, stdin=stdin)  # which traces models of its own
    counts: Counter[str] = Counter()
    for owner, name in (
        (duoka.Checkpoint, "_of"),
        (from_checkpoint.models, "build"),
        (from_checkpoint, "load_tokenizer"),
    ):
        method = getattr(owner, name)

        def count(*given: Any, _name: str = name, _method: Any = method, **more: Any) -> Any:
            counts[_name] += 1
            return _method(*given, **more)

        monkeypatch.setattr(owner, name, count)
    assert program(*command, tiny, *GPUS, *SIZES, stdin=stdin).returncode == 0
    assert counts == {"_of": 1, "build": 1, "load_tokenizer": 1}


@pytest.mark.slow
def test_prompts_come_from_files_and_the_standard_input(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "question.txt"
    file.write_text("What is NVLink?\n", encoding="utf-8")
    expected = program("generate", tiny, *GPUS, *SIZES, "-p", "What is NVLink?").stdout
    assert program("generate", tiny, *GPUS, *SIZES, "--prompt-file", file).stdout == expected
    for given in ((), ("--prompt", "-")):
        done = program("generate", tiny, *GPUS, *SIZES, *given, stdin="What is NVLink?\n")
        assert done.stdout == expected


@pytest.mark.slow
def test_a_saved_plan_is_used(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    program("plan", tiny, *GPUS, *SIZES, "--use-all", "--save", saved)
    done = program("generate", "--plan", saved, "-p", "hello", "--json")
    assert json.loads(done.stdout)["devices"] == ["vgpu:0", "vgpu:1"]
    # More prompts than were planned for run one after another.
    done = program("generate", tiny, "--plan", saved, "-p", "hello", "-p", "hi", "--json")
    assert len(json.loads(done.stdout)["answers"]) == 2


def test_a_saved_plan_keeps_how_long_answers_may_be(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    """`--new-tokens` that was said; what is kept for an answer by default limits none."""
    saved = tmp_path / "plan.json"

    def new_tokens() -> int:
        done = program("generate", "--plan", saved, "-p", "hello", "--json")
        (answer,) = json.loads(done.stdout)["answers"]
        number: int = answer["new_tokens"]
        return number

    program("plan", tiny, *GPUS, "--context", "96", "--new-tokens", "2", "--save", saved)
    assert new_tokens() == 2
    program("plan", tiny, *GPUS, "--context", "96", "--save", saved)
    assert new_tokens() > 24  # a quarter of the context is kept


def test_raw_continues_the_text(tiny: Path, program: Program) -> None:
    text = "设备映射"
    done = program("generate", tiny, *GPUS, *SIZES, "-p", text, "--raw", "--json")
    (answer,) = json.loads(done.stdout)["answers"]
    tokenizer: Any = duoka.tokenizer(tiny)
    ids = tokenizer(text, return_tensors="pt").input_ids
    work = duoka.Workload(prompt_tokens=64, new_tokens=32)
    model: Any = duoka.load(duoka.plan(tiny, GPUS[1], work))
    expected = model.generate(ids.to(model.device), do_sample=False, max_new_tokens=32)[0].cpu()
    said = tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True)
    assert (answer["prompt_tokens"], answer["text"]) == (ids.shape[1], said)
    chat = program("generate", tiny, *GPUS, *SIZES, "-p", text, "--json")
    assert json.loads(chat.stdout)["answers"][0]["prompt_tokens"] > ids.shape[1]


@pytest.mark.parametrize("given", [("-p", "a\udcff"), ("--prompt-file", "damaged.txt")])
def test_what_is_no_text_is_refused(
    given: tuple[str, str], program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.txt").write_bytes(b"a\xff")
    done = program("generate", "x", *given)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_sampling_options(tiny: Path, program: Program) -> None:
    hot = ("--temperature", "2", "--top-p", "0.9", "--top-k", "50")
    first, second = (
        program("generate", tiny, *GPUS, *SIZES, "-p", "hello", *hot, "--seed", seed)
        for seed in (1, 1)
    )
    assert first.returncode == 0
    assert first.stdout == second.stdout
