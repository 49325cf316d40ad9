"""Plans that are no stages of whole layers are refused, with where they aren't."""

from __future__ import annotations

from dataclasses import replace

import pytest
from staged import placed, rearranged, staged

from duoka import export
from duoka.errors import UsageError
from duoka.report.export import TOOLS
from duoka.report.export.stages import to_layer_pipeline

LAYERED = [tool for tool in TOOLS if tool not in ("accelerate", "swift")]


def test_a_plan_is_read_as_stages() -> None:
    pipeline = to_layer_pipeline(staged([5, 3, 2]), "tool")
    assert (pipeline.layers, pipeline.num_layers, pipeline.counts) == (
        "model.layers",
        10,
        [5, 3, 2],
    )
    assert [stage.device.name for stage in pipeline.stages] == ["cuda:0", "cuda:1", "cuda:2"]
    assert pipeline.returning == ()


def test_a_head_that_returns_is_told() -> None:
    plan = placed(staged([3, 2]), lm_head="cuda:0")
    assert to_layer_pipeline(plan, "tool").returning == ("lm_head",)
    for tool in LAYERED:
        assert "lm_head is tied" in str(export(plan, tool))


def test_a_vision_tower_before_the_layers_counts_as_one_part() -> None:
    plan = staged([2, 2])
    tower = tuple((f"model.vision.blocks.{number}", "cuda:0") for number in range(9))
    whole = (*tower, *plan.placement.entries)
    pipeline = to_layer_pipeline(rearranged(plan, whole), "tool")
    assert (pipeline.layers, pipeline.counts) == ("model.layers", [2, 2])
    cut = (("model.vision.blocks.0", "cuda:1"), *whole[1:])
    with pytest.raises(UsageError, match=r"model.vision.blocks.0, which runs before its layers"):
        to_layer_pipeline(rearranged(plan, cut), "tool")


@pytest.mark.parametrize("tool", LAYERED)
def test_what_is_no_pipeline_is_refused(tool: str) -> None:
    plan = staged([3, 2])
    attention = plan.placement.entries[:2] + tuple(
        (f"model.layers.{number}.{part}", "cuda:0" if number + (part == "mlp") < 3 else "cuda:1")
        for number in range(5)
        for part in ("attention", "mlp")
    )
    for wrong, why in (
        (placed(plan, model__layers__1="cuda:1"), r"cuda:\d has layers in several places"),
        (placed(plan, model__embed_tokens="cuda:1"), "model.embed_tokens, which runs before"),
        (placed(plan, model__norm="cuda:0"), "model.norm, which runs after them, is on cuda:0"),
        (rearranged(plan, attention), r"model\.layers\.2 is split between cuda:0 and cuda:1"),
        (
            placed(staged([3, 2, 1]), model__layers__5="cuda:1", model__norm="cuda:1"),
            "lm_head, which runs after them, is on cuda:2",
        ),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            export(wrong, tool)
        assert caught.value.hint


def test_offload_is_refused_where_it_can_not_be_told() -> None:
    plan = replace(staged([3, 2]), offloaded=("model.layers.0", "model.layers.1"))
    for tool in LAYERED:
        with pytest.raises(UsageError, match="2 modules are offloaded to CPU memory"):
            export(plan, tool)
    assert "'model.layers.1': 'cpu'" in export(plan, "accelerate").text


def test_a_model_without_layers_goes_on_one_device() -> None:
    plan = staged([4], gpus="24GiB")
    whole = rearranged(plan, (("encoder", "cuda:0"), ("head", "cuda:0")))
    assert "--pipeline-parallel-size" not in export(whole, "vllm").text
    assert "--split-mode none" in export(whole, "llama.cpp").text


def test_nothing_in_a_plan_gets_out_of_its_quotes() -> None:
    hostile = replace(staged([2, 2]), source="a'; rm -rf ~ #\n\u202e$(x)", model="M\nimport os")
    for tool in TOOLS:
        done = export(hostile, tool)
        for note in str(done).removesuffix(done.text).splitlines():
            assert note.startswith("#")
        assert "\nimport os" not in str(done).replace("\nimport torch", "")
    assert "'a'\"'\"'; rm -rf ~ #\n" in export(hostile, "vllm").text
