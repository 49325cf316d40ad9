"""The five situations that people run into: each found at its line, repaired, and proved."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import seeded
from checkpoints import write_random
from closeness import close
from image_checkpoints import GLM_4V_9B
from seeded import Case

import duoka
from duoka import Workload
from duoka.checker.fix import Patch
from duoka.forecast.workload import Quantization
from duoka.tools.demo.checkpoint import CONFIG

SITUATIONS = Path(__file__).parent / "situations"
TINY = {
    **CONFIG,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 4,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "multi_query_group_num": 1,
}
WORK = Workload(prompt_tokens=12, new_tokens=3)
OTHER_VERSION = {
    "transformer.word_embeddings": 0,
    "transformer.layers.0": 0,
    "transformer.layers.1": 0,
    "transformer.layers.2": 1,
    "transformer.layers.3": 1,
    "transformer.final_layernorm": 1,
    "lm_head": 1,
}


@cache
def situation(name: str) -> tuple[Case, duoka.Report]:
    case = seeded.load(SITUATIONS / f"{name}.py")
    return case, duoka.check(case.build(), case.placement, inputs=case.inputs(), train=case.train)


@cache
def repaired(name: str) -> Patch:
    """The proved patch of a situation's only file."""
    repairs = duoka.repair(situation(name)[1])
    assert repairs.proved, [patch.reason for patch in repairs]
    (patch,) = repairs
    return patch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("chatglm3"), TINY, seed=11)


@pytest.mark.slow
def test_a_map_with_the_names_of_another_version_is_listed_and_completed(checkpoint: Path) -> None:
    report = duoka.check(checkpoint, OTHER_VERSION, workload=WORK)
    assert not report.complete
    assert not report.ok
    wrong = report.completeness
    # `lm_head` is what duoka's own model calls its output layer, so that name is understood.
    assert set(wrong.unknown) == set(OTHER_VERSION) - {"lm_head"}
    assert "transformer.embedding.word_embeddings.weight" in wrong.missing
    assert any(name.startswith("transformer.encoder.layers.3.") for name in wrong.missing)
    assert "transformer.embedding.word_embeddings" in wrong.nearest["transformer.word_embeddings"]
    assert wrong.completed is not None
    again = duoka.check(checkpoint, dict(wrong.completed), workload=WORK)
    assert again.complete
    assert again.ok
    assert again.devices == ("cuda:0", "cuda:1")
    with_empty = {**wrong.completed, "model.layers.0.mlp.activation_fn": "cuda:0"}
    assert duoka.check(checkpoint, with_empty, workload=WORK).complete, "it holds nothing"


def test_a_map_that_misses_one_parameter_is_refused(checkpoint: Path) -> None:
    complete = duoka.check(checkpoint, OTHER_VERSION, workload=WORK).completeness.completed
    assert complete is not None
    cut = {name: device for name, device in complete.items() if "rotary" not in name}
    report = duoka.check(checkpoint, cut, workload=WORK)
    assert not report.complete
    assert all("rotary" in name for name in report.completeness.missing)


def test_only_the_third_and_fourth_of_eight_cards_are_used() -> None:
    _, report = situation("clean_two_of_eight")
    assert report.ok
    assert not report.warnings
    assert report.devices == ("cuda:2", "cuda:3")
    assert {peak.device for peak in report.memory} == {"cuda:2", "cuda:3"}
    assert all(peak.allocated_bytes > 0 for peak in report.memory)


FAULTY = ["fault_cache_at_prefill", "fault_loss_of_fine_tuning", "fault_vision"]


@pytest.mark.parametrize("name", FAULTY)
def test_it_is_found_at_its_line_and_nothing_else_and_repaired(name: str) -> None:
    case, report = situation(name)
    # The model runs on one device, and on several it fails where it is marked.
    seeded.run_on_one_device(case)
    assert set(seeded.errors(case)) == set(case.marked("fault"))
    assert {seeded.line_of(fault): fault.kind for fault in report.faults} == case.marked("fault")
    assert report.stop is None
    before = case.path.read_text(encoding="utf-8")
    patch = repaired(name)
    assert patch.file == str(case.path)
    assert case.path.read_text(encoding="utf-8") == before
    changed = [line for line in patch.diff.splitlines() if line.startswith("-  ")]
    assert all("# fault" in line for line in changed)


def test_the_cache_is_found_in_prefill_between_the_cards_of_its_layers() -> None:
    _, report = situation("fault_cache_at_prefill")
    (fault,) = report.faults
    assert fault.op == "torch.cat"
    assert set(fault.devices) == {"cuda:0", "cuda:1"}
    assert fault.function == "Encoder.forward"
    assert fault.expressions == ("kept", "kv.unsqueeze(0)")


def test_the_labels_go_to_the_logits() -> None:
    _, report = situation("fault_loss_of_fine_tuning")
    (fault,) = report.faults
    assert fault.devices == ("cuda:3", "cuda:1")
    assert fault.target == "cuda:3"
    assert [each.expression for each in fault.operands if each.moved] == ["wanted"]
    assert "wanted.to(ahead.device)" in repaired("fault_loss_of_fine_tuning").diff


def test_the_features_go_to_the_embeddings() -> None:
    _, report = situation("fault_vision")
    residual, splice = report.faults
    assert (residual.function, set(residual.devices)) == (
        "VisionBlock.forward",
        {"cuda:1", "cuda:2"},
    )
    assert residual.modules == ("vision.blocks.1",)
    assert splice.target == "cuda:0"
    assert [each.expression for each in splice.operands if each.moved] == ["image"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "quantize"), [("5xRTX3090", "none"), ("2xRTX3090", "none"), ("2xRTX4080", "int8")]
)
def test_a_vision_model_at_full_size_runs_on_cards_that_hold_it(
    tmp_path: Path, gpus: str, quantize: Quantization
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GLM_4V_9B), encoding="utf-8")
    height, width = size = (1120, 1120)
    workload = Workload(
        prompt_tokens=3584, new_tokens=512, quantize=quantize, images=1, image_size=size
    )
    plan = duoka.plan(config, gpus, workload, use_all=True)
    assert len(plan.devices) == int(gpus[0])
    report = duoka.check(config, plan, images=[(width, height)])
    assert report.ok
    assert report.fits


def test_two_cards_compute_what_one_computes_after_the_repair() -> None:
    """The proof is duoka's own; here the patched file itself is run."""
    case, _ = situation("fault_cache_at_prefill")
    patch = repaired("fault_cache_at_prefill")
    patched: dict[str, object] = {"__name__": "patched"}
    source = compile(patch.after, case.path.name, "exec")
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(SITUATIONS))
        exec(source, patched)
    build = patched["build"]
    assert callable(build)
    model, original = build(), case.build()
    model.load_state_dict(original.state_dict())
    expected = original(**case.inputs())
    assert close(model(**case.inputs()), expected)
    assert duoka.check(model, case.placement, inputs=case.inputs()).ok
