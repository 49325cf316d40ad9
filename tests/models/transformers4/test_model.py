"""Code for transformers 4 under check, repair, plan and generate: that of `heron`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import duoka
from duoka import Checkpoint, Fleet, Workload
from duoka.checker.prove import prove
from duoka.errors import ModelError
from duoka.models.from_checkpoint import build_model
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.terminal import render_report
from duoka.report.terminal.check import render_plain
from duoka.tracing import TraceSpec
from duoka.tracing.trace_training import trace_training_workload

from .conftest import MakeHeron

pytestmark = pytest.mark.usefixtures("single_sequences")

WORK = Workload(prompt_tokens=24, new_tokens=8, dtype="float32")
TWO = "virtual:2x64MiB"
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 64} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def line_of(checkpoint: Checkpoint, text: str) -> int:
    lines = (checkpoint.path / "modeling_heron.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def answers(checkpoint: Checkpoint, fleet: str, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits of a prompt, and greedy tokens."""
    plan = duoka.plan(checkpoint, fleet, WORK, use_all=True)
    model = duoka.load(plan, trust_remote_code=True)
    device = torch.device(next(iter(plan.device_map.values())))
    ids = (torch.arange(20)[None] * 7 % 90 + 3).repeat(len(mask), 1).to(device)
    mask = mask.to(device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits.cpu()
        new = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return logits, new.cpu()


@pytest.mark.slow
def test_it_runs_on_two_devices_as_on_one(heron: MakeHeron) -> None:
    checkpoint = heron()
    mask = torch.ones(1, 20, dtype=torch.long)
    one, other = answers(checkpoint, "virtual:64MiB", mask), answers(checkpoint, TWO, mask)
    torch.testing.assert_close(one[0], other[0])
    assert one[0].isfinite().all()
    assert torch.equal(one[1], other[1])
    assert one[1].shape == (1, 26)


def test_generation_calls_it_as_it_expects(heron: MakeHeron) -> None:
    """Greedy tokens are those of calling it with all tokens each time."""
    checkpoint = heron()
    plan = duoka.plan(checkpoint, "virtual:64MiB", WORK)
    model = duoka.load(plan, trust_remote_code=True)
    ids = torch.tensor([[5, 17, 33, 60, 12]], device=plan.devices[0])
    new = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=-1)
    assert torch.equal(new.cpu(), ids.cpu())


def test_a_clean_one_is_clean(heron: MakeHeron) -> None:
    checkpoint = heron()
    report = duoka.check(checkpoint, fleet=TWO, workload=WORK)
    assert report.ok
    assert report.code == "HeronForCausalLM of modeling_heron.py"
    assert report.not_run == ()


def test_the_loss_is_found_and_mended(heron: MakeHeron) -> None:
    checkpoint = heron()
    report = duoka.check(checkpoint, fleet=TWO, workload=WORK, train=True)
    [fault] = report.faults
    assert (fault.op, fault.line) == (
        "torch.nn.functional.cross_entropy",
        line_of(checkpoint, "loss = F.cross_entropy("),
    )
    [patch] = duoka.repair(report)
    assert patch.proved, patch.reason


@pytest.mark.slow
def test_a_cache_in_one_tensor_is_found_and_mended(heron: MakeHeron) -> None:
    """A plan keeps the layers whole, and so avoids the fault: the check cuts them all the same."""
    checkpoint = heron(joined_cache=True)
    plan = duoka.plan(checkpoint, TWO, WORK, use_all=True)
    assert len({d for m, d in plan.device_map.items() if m.startswith("transformer.encoder")}) == 1
    assert any("combines the outputs of its layers" in str(reason.values) for reason in plan.why)
    report = duoka.check(checkpoint, fleet=TWO, workload=WORK)
    [fault] = report.faults
    assert (fault.op, fault.line) == (
        "torch.cat",
        line_of(checkpoint, "presents = torch.cat((presents, cache), dim=0)"),
    )
    [patch] = duoka.repair(report)
    assert patch.proved, patch.reason


def test_it_trains(heron: MakeHeron) -> None:
    report = duoka.check(heron(), {"": 0}, workload=WORK, train=True)
    assert report.ok


@pytest.mark.slow
def test_a_verdict_is_about_the_code_that_ran(tmp_path: Path, heron: MakeHeron) -> None:
    """A model type that transformers has, with a file of its own: the file isn't what ran."""
    checkpoint = heron(model_type="llama", **LLAMA)
    untrusted = Checkpoint.open(checkpoint.path / "config.json")
    assert untrusted.untrusted_code == ()
    (checkpoint.path / "model.safetensors").unlink()
    report = duoka.check(Checkpoint.open(checkpoint.path), fleet=TWO, workload=WORK)
    assert report.not_run == ("modeling_heron.py",)
    assert report.code == "LlamaForCausalLM of transformers"
    first, *_ = render_plain(render_report(report)).splitlines()
    assert first.startswith("modeling_heron.py of")
    assert "--trust-remote-code" in render_plain(render_report(report))
    own = duoka.check(checkpoint, fleet=TWO, workload=WORK)
    assert own.code == "HeronForCausalLM of modeling_heron.py"


def test_a_cache_that_comes_with_its_name(heron: MakeHeron) -> None:
    """As from 4.42 to 4.48."""
    checkpoint = heron()
    file = checkpoint.path / "modeling_heron.py"
    text = file.read_text()
    old = """        model_kwargs["past_key_values"] = self._extract_past_from_model_output(
            outputs, standardize_cache_format=standardize_cache_format
        )
"""
    new = """        name, cache = self._extract_past_from_model_output(outputs)
        model_kwargs[name] = cache
"""
    assert old in text
    file.write_text(text.replace(old, new))
    assert duoka.check(
        Checkpoint.open(checkpoint.path, trust_remote_code=True), fleet=TWO, workload=WORK
    ).ok


@pytest.mark.parametrize("auto_map", [None, {"AutoModel": "org/name--modeling_heron.Heron"}])
def test_code_that_the_configuration_leaves_out(heron: MakeHeron, auto_map: object) -> None:
    checkpoint = heron()
    config = {**checkpoint.config, "auto_map": auto_map}
    (checkpoint.path / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(checkpoint.path).untrusted_code == ("modeling_heron.py",)


@pytest.mark.slow
def test_what_no_plan_spreads_is_not_clean(heron: MakeHeron) -> None:
    """Code that joins its caches, and moves them: spread it runs, and a plan keeps it whole."""
    checkpoint = heron(joined_cache=True, hidden_size=256, num_layers=12)
    file = checkpoint.path / "modeling_heron.py"
    old = "torch.cat((presents, cache), dim=0)"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, "torch.cat((presents, cache.to(presents.device)), dim=0)"))
    checkpoint = Checkpoint.open(checkpoint.path, trust_remote_code=True)
    assert duoka.check(checkpoint, fleet=TWO, workload=WORK).ok
    whole = duoka.plan(checkpoint, "virtual:1GiB", WORK).forecast.devices[0].reserved_bytes
    report = duoka.check(checkpoint, fleet=f"virtual:2x{whole - 2**22}B", workload=WORK)
    assert not report.faults
    assert report.stop is not None
    assert report.stop.phase == "plan"
    assert "does not fit" in report.stop.message


def test_another_class_that_needs_less_is_named(heron: MakeHeron) -> None:
    work, small = Workload(prompt_tokens=2000, dtype="float32"), "virtual:2x4MiB"
    checkpoint = heron(model_type="llama", **LLAMA)
    note = "duoka's class of this model does"
    placement = {"": "vgpu:0"}
    report = duoka.check(checkpoint, placement, workload=work, fleet=small)
    assert any(note in it for it in report.notes)
    with pytest.raises(duoka.errors.InfeasibleError, match=note):
        duoka.plan(checkpoint, small, work, suggest=False)


def test_chunks_are_refused(heron: MakeHeron) -> None:
    with pytest.raises(duoka.errors.UsageError, match="chunks of 8"):
        duoka.plan(heron(), TWO, Workload(prompt_tokens=24, prefill_chunk_tokens=8))


def test_after_its_prompt_it_is_called_with_single_tokens(heron: MakeHeron) -> None:
    checkpoint = heron()
    file = checkpoint.path / "modeling_heron.py"
    before = "        tokens = input_ids.shape[1]\n"
    file.write_text(
        file.read_text().replace(
            before, f"{before}        assert tokens == 1 or not past_key_values\n"
        )
    )
    work = Workload(prompt_tokens=24, new_tokens=40, dtype="float32")
    trusted = Checkpoint.open(checkpoint.path, trust_remote_code=True)
    assert duoka.check(trusted, fleet=TWO, workload=work).ok


def test_gradient_checkpointing_takes_less_memory(heron: MakeHeron) -> None:
    """Its own switch does nothing, as that of GLM-4's published code."""
    checkpoint = heron()
    peaks = []
    for checkpoints in (False, True):
        training = duoka.Training(gradient_checkpointing=checkpoints)
        load = replace(WORK, prompt_tokens=200, new_tokens=0, training=training)
        spec = TraceSpec(fingerprint="heron", conditions=load.conditions)
        profile = trace_training_workload(build_model(checkpoint, load), spec, load)
        plan = find_plan(profile, PlanProblem(fleet=Fleet.parse("virtual:64MiB"), workload=load))
        [measured] = prove(plan, build_model(checkpoint, load))
        [told] = plan.forecast.devices
        assert told.allocated_bytes == pytest.approx(measured.allocated_bytes, rel=0.002)
        peaks.append(measured.allocated_bytes)
    assert peaks[1] < 0.7 * peaks[0]


def test_gradient_checkpointing_that_its_layers_never_ask_for_is_refused(heron: MakeHeron) -> None:
    checkpoint = heron()
    file = checkpoint.path / "modeling_heron.py"
    asked = "self.gradient_checkpointing and self.training"
    file.write_text(file.read_text().replace(asked, "False"))
    checkpoint = Checkpoint.open(checkpoint.path, trust_remote_code=True)
    load = Workload(new_tokens=0, training=duoka.Training(gradient_checkpointing=True))
    with pytest.raises(ModelError, match="recomputes nothing in its backward pass"):
        duoka.plan(checkpoint, TWO, load)


def rewritten(checkpoint: Checkpoint, *changes: tuple[str, str]) -> Checkpoint:
    """The checkpoint with other code."""
    file = checkpoint.path / "modeling_heron.py"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return Checkpoint.open(checkpoint.path, trust_remote_code=True)


FLASH = (
    ("import sys\n", "import sys\nfrom flash_attn import flash_attn_func\n"),
    (
        "F.scaled_dot_product_attention(query, key, value, is_causal=True)",
        "flash_attn_func(*(it.transpose(1, 2) for it in (query, key, value)), causal=True)"
        ".transpose(1, 2)",
    ),
)


def test_code_that_needs_flash_attn_runs_without_it(heron: MakeHeron) -> None:
    render_plain = heron()
    mask = torch.ones(1, 20, dtype=torch.long)
    expected = answers(render_plain, TWO, mask)
    checkpoint = rewritten(render_plain, *FLASH)
    assert duoka.check(checkpoint, fleet=TWO, workload=WORK).ok
    for found, one in zip(answers(checkpoint, TWO, mask), expected, strict=True):
        torch.testing.assert_close(found, one)


def hint_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """The message and the hint of a check that stops."""
    report = duoka.check(checkpoint, fleet=TWO, workload=WORK)
    assert report.stop is not None
    return report.stop.message, report.stop.hint


def test_a_module_beside_the_code_is_no_package_to_install(heron: MakeHeron) -> None:
    change = "from .configuration_heron import", "from configuration_heron import"
    message, hint = hint_of(rewritten(heron(), change))
    assert "No module named 'configuration_heron'" in message
    assert hint == (
        "configuration_heron.py is beside the code: the code must use `from .configuration_heron "
        "import …`"
    )


def test_a_name_that_anybody_may_publish_is_no_package_to_install(heron: MakeHeron) -> None:
    message, hint = hint_of(rewritten(heron(), ("import sys\n", "import sys, heron_tricks\n")))
    assert "heron_tricks" in message
    assert "pip install" not in hint
    assert "see the model's page" in hint


def test_what_flash_attn_has_and_its_stand_in_lacks_is_said(heron: MakeHeron) -> None:
    missing = "import sys\n", "import sys\nfrom flash_attn.losses import CrossEntropyLoss\n"
    checkpoint = rewritten(heron(), missing)
    message, hint = hint_of(checkpoint)
    assert "cannot import name 'CrossEntropyLoss'" in message
    assert "pip install flash-attn" in hint
    refused = FLASH[1][0], FLASH[1][1].replace("causal=True", "causal=True, softcap=2.0")
    undone = missing[1], missing[0]
    message, hint = hint_of(rewritten(checkpoint, undone, FLASH[0], refused))
    assert "unexpected keyword argument 'softcap'" in message
    assert "pip install flash-attn" in hint


def test_a_picture_that_was_not_given_is_asked_for(heron: MakeHeron) -> None:
    change = "x = x + self.dense(", "assert tokens > 1000, 'no image'\n        x = x + self.dense("
    for settings, expected in (({"vision_config": {}}, "--images 1"), ({}, "versions")):
        checkpoint = rewritten(heron(**settings), change)
        assert expected in hint_of(checkpoint)[1]
        shutil.rmtree(checkpoint.path)
