"""The maps that people copied for ChatGLM: its parts dealt over N GPUs, in the names of ChatGLM-6B.

28 layers and two more shares (the embedding; the final norm with the head, both on the first GPU)
are dealt in order, so many to each GPU. ChatGLM2 and 3 and GLM-4 have other names, and one module
more. Each map is held against the list of what it misses, and what is offered instead is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoints import write_random
from closeness import close

import duoka
from duoka import Checkpoint, Workload
from duoka.errors import PlacementError
from duoka.forecast.tensor_names import Outline
from duoka.models.from_checkpoint import build_model
from duoka.planner.device_map import judge
from duoka.planner.resolve import workload_for
from duoka.tools.demo.checkpoint import CONFIG
from duoka.tracing import TraceSpec, trace_workload

pytestmark = pytest.mark.usefixtures("single_sequences")

FIRST = ("transformer.word_embeddings", "transformer.final_layernorm", "lm_head")
FIRST_LAYERS = "transformer.layers"
LATER = (
    "transformer.embedding.word_embeddings",
    "transformer.encoder.final_layernorm",
    "transformer.output_layer",
)
LATER_LAYERS = "transformer.encoder.layers"
ROTARY = "transformer.rotary_pos_emb"
GPUS = range(2, 17)
NUM_LAYERS = 28
IN_A_LAYER = (
    "self_attention.query_key_value.weight",
    "self_attention.query_key_value.bias",
    "self_attention.dense.weight",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_4h_to_h.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def dealt(
    num_gpus: int, outer: tuple[str, ...] = FIRST, layers: str = FIRST_LAYERS, count: int = 28
) -> dict[str, int]:
    share = -(-(count + 2) // num_gpus)
    return dict.fromkeys(outer, 0) | {f"{layers}.{n}": (n + 2) // share for n in range(count)}


def expected(num_gpus: int, count: int = NUM_LAYERS) -> dict[str, int]:
    """The complete map, in the order of execution."""
    given = dealt(num_gpus, LATER, LATER_LAYERS, count)
    layers = {name: gpu for name, gpu in given.items() if name not in LATER}
    return {LATER[0]: 0, ROTARY: 0, **layers, LATER[1]: 0, LATER[2]: 0}


TINY = {
    **CONFIG,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "multi_query_group_num": 1,
}
LOAD = Workload(prompt_tokens=20, new_tokens=4, prefill_chunk_tokens=None)


def outlined(path: Path) -> Outline:
    """The names of a checkpoint's tensors, without all the rules of what it costs."""
    checkpoint = Checkpoint.open(path)
    spec = TraceSpec(
        fingerprint=checkpoint.fingerprint,
        published=None if checkpoint.tensors is None else tuple(checkpoint.tensors),
    )
    load = workload_for(checkpoint, LOAD)
    return trace_workload(build_model(checkpoint, load), spec, [load]).outline


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many layers as ChatGLM3-6B has, each of them tiny."""
    return write_random(tmp_path_factory.mktemp("dealt"), TINY, seed=5)


@pytest.fixture(scope="module")
def outline(checkpoint: Path) -> Outline:
    return outlined(checkpoint)


def refused(device_map: Mapping[str, object], outline: Outline, num_gpus: int) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        judge(device_map, outline, duoka.Fleet.parse(f"virtual:{num_gpus}x1GiB"))
    return caught.value


def check_first(outline: Outline, num_gpus: int, count: int = NUM_LAYERS) -> None:
    error = refused(dealt(num_gpus, count=count), outline, num_gpus)
    assert error.missing == (
        f"{LATER[0]}.weight",
        f"{ROTARY}.inv_freq",
        *(f"{LATER_LAYERS}.{n}.{name}" for n in range(count) for name in IN_A_LAYER),
        f"{LATER[1]}.weight",
    )
    names = (FIRST[0], FIRST[1], *(f"{FIRST_LAYERS}.{n}" for n in range(count)))
    assert error.unknown == names
    assert {name: near[0] for name, near in error.nearest.items()} == {
        FIRST[0]: LATER[0],
        FIRST[1]: LATER[1],
        **{f"{FIRST_LAYERS}.{n}": f"{LATER_LAYERS}.{n}" for n in range(count)},
    }
    assert (error.doubled, error.split, error.misplaced) == ((), (), ())
    # "lm_head" is a name of the model's own, so the head is where it was put.
    assert error.completed == expected(num_gpus, count)


def check_later(outline: Outline, num_gpus: int, count: int = NUM_LAYERS) -> None:
    device_map = dealt(num_gpus, LATER, LATER_LAYERS, count)
    error = refused(device_map, outline, num_gpus)
    assert error.missing == (f"{ROTARY}.inv_freq",)
    assert (error.unknown, error.doubled, error.split) == ((), (), ())
    assert error.completed == expected(num_gpus, count)
    fleet = duoka.Fleet.parse(f"virtual:{num_gpus}x1GiB")
    complete = dict(judge({**device_map, ROTARY: 0}, outline, fleet).placed)
    assert complete == dict(judge(error.completed, outline, fleet).placed)
    assert complete["model.layers.0"] == f"vgpu:{expected(num_gpus, count)[f'{LATER_LAYERS}.0']}"


def test_what_the_maps_miss(outline: Outline) -> None:
    for num_gpus in GPUS:
        check_first(outline, num_gpus)
        check_later(outline, num_gpus)


def test_what_they_miss_of_glm_4(published_data: Path) -> None:
    outline = outlined(published_data / "configs" / "glm-4-9b-chat.json")
    for num_gpus in GPUS:
        check_first(outline, num_gpus, count=40)
        check_later(outline, num_gpus, count=40)
    # Made for 28 layers, as copied from one model to another.
    error = refused(dealt(4, LATER, LATER_LAYERS), outline, 4)
    assert error.missing[0] == f"{ROTARY}.inv_freq"
    assert len(error.missing) == 1 + 12 * len(IN_A_LAYER)
    assert error.completed is not None
    assert error.completed[f"{LATER_LAYERS}.39"] == 3
    # And one for more layers than there are.
    error = refused(dealt(4, LATER, LATER_LAYERS, count=45), outline, 4)
    assert error.unknown == tuple(f"{LATER_LAYERS}.{n}" for n in range(40, 45))
    assert set(error.nearest.values()) == {(f"{LATER_LAYERS}.39",)}


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> torch.Tensor:
    """What one device computes."""
    model = duoka.load(duoka.plan(checkpoint, "virtual:64MiB", LOAD))
    with torch.no_grad():
        logits: torch.Tensor = model(ids().to("vgpu:0")).logits.cpu()
    return logits


def ids() -> torch.Tensor:
    return torch.arange(3, 15).reshape(1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [3, 16])
def test_the_completed_map_is_loaded_and_computes_the_same(
    checkpoint: Path, whole: torch.Tensor, num_gpus: int
) -> None:
    fleet = f"virtual:{num_gpus}x32MiB"
    with pytest.raises(PlacementError) as caught:
        duoka.plan(checkpoint, fleet, LOAD, device_map=dealt(num_gpus))
    plan = duoka.plan(checkpoint, fleet, LOAD, device_map=caught.value.completed)
    assert plan.objective == "given"
    # The last layers are elsewhere than the head: the way leads back to the first GPU.
    assert list(plan.device_map.values())[-3:] == [
        f"vgpu:{29 // -(-30 // num_gpus)}",
        *["vgpu:0"] * 2,
    ]
    model = duoka.load(plan)
    assert {name: str(p.device) for name, p in model.named_parameters()} == {
        name: plan.placement.device_of(name) for name, _ in model.named_parameters()
    }
    with torch.no_grad():
        logits = model(ids().to("vgpu:0")).logits
        assert logits.device == torch.device("vgpu:0")
        assert close(logits, whole)
        tokens = model.generate(ids().to("vgpu:0"), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 16)
