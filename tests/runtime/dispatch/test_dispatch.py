"""A model over several virtual GPUs is the model on one, and stays an ordinary one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from torch import Tensor, nn
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from duoka import virtual
from duoka.errors import ModelError, PlacementError
from duoka.models.cache_argument import CACHE
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch, undispatch
from duoka.runtime.dispatch.place_tensors import tensor_names

NUM_LAYERS = 4


# transformers has renamed gradient checkpointing; peft uses the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _three_gpus() -> None:
    virtual.set_gpus([None, None, None])  # for every thread


def glm(**changes: Any) -> GlmForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_hidden_layers": NUM_LAYERS, "num_key_value_heads": 2, "head_dim": 8,
        "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    model: GlmForCausalLM = GlmForCausalLM(GlmConfig(**{**sizes, **changes})).eval()
    return model


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=64, eos_token_id=1
    )
    return GPT2LMHeadModel(config).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).eval()


def placement(*groups: tuple[str, str]) -> Placement:
    """Entries from (device, names separated by blanks)."""
    entries = tuple((name, device) for device, names in groups for name in names.split())
    return Placement(entries=entries)


GLM = placement(
    ("vgpu:0", "model.embed_tokens model.rotary_emb model.layers.0"),
    ("vgpu:1", "model.layers.1 model.layers.2"),
    ("vgpu:2", "model.layers.3 model.norm lm_head"),
)
GPT2 = placement(
    ("vgpu:0", "transformer.wte transformer.wpe transformer.h.0"),
    ("vgpu:1", "transformer.h.1 transformer.h.2"),
    ("vgpu:2", "transformer.h.3 transformer.ln_f"),
    ("vgpu:0", "lm_head"),  # tied: back to its partner's device
)
T5 = placement(
    ("vgpu:0", "shared encoder.embed_tokens encoder.block.0"),
    ("vgpu:1", "encoder.block.1 encoder.final_layer_norm"),
    ("vgpu:0", "decoder.embed_tokens decoder.block.0"),
    ("vgpu:2", "decoder.block.1 decoder.final_layer_norm"),
    ("vgpu:0", "lm_head"),
)


def both(model: PreTrainedModel, spread: Placement) -> tuple[PreTrainedModel, PreTrainedModel]:
    one = dispatch(copy.deepcopy(model), Placement(entries=(("", "vgpu:0"),)))
    return one, dispatch(model, spread)


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, 97, (batch, length), generator=generator).to("vgpu:0")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def train_step(model: PreTrainedModel, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach().cpu(), gradients(model)


def assert_same_training(
    one: PreTrainedModel, many: PreTrainedModel, **inputs: Tensor
) -> dict[str, Tensor]:
    (loss, grads), (other_loss, other_grads) = train_step(one, **inputs), train_step(many, **inputs)
    assert close(other_loss, loss)
    assert grads.keys() == other_grads.keys()
    assert [name for name in grads if not close(other_grads[name], grads[name])] == []
    return grads


FAMILIES = [(glm, GLM), (gpt2, GPT2)]


@pytest.mark.parametrize(("make", "spread"), FAMILIES, ids=["glm", "gpt2"])
class TestSameAsOneDevice:
    def test_logits(self, make: Any, spread: Placement) -> None:
        one, many = both(make(), spread)
        logits = many(tokens()).logits
        assert str(logits.device) == "vgpu:0"
        assert close(logits, one(tokens()).logits)

    @pytest.mark.parametrize(
        "options",
        [
            {"do_sample": False},
            {"do_sample": True, "temperature": 1e-5, "top_p": 0.8},
            {"do_sample": False, "num_beams": 3},
            {"do_sample": False, "cache_implementation": "static"},
            {"do_sample": True, "temperature": 0.9},
        ],
        ids=["greedy", "cold", "beams", "static", "sampling"],
    )
    def test_generation(self, make: Any, spread: Placement, options: dict[str, Any]) -> None:
        answers = []
        for model in both(make(), spread):
            torch.manual_seed(3)
            answers.append(model.generate(tokens(), max_new_tokens=6, **options).tolist())
        assert answers[0] == answers[1]

    def test_a_padded_batch(self, make: Any, spread: Placement) -> None:
        one, many = both(make(), spread)
        ids, mask = tokens(), torch.ones(2, 9, dtype=torch.long, device="vgpu:0")
        mask[0, :4] = 0
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        assert many.generate(ids, **options).tolist() == one.generate(ids, **options).tolist()

    def test_loss_and_gradients(self, make: Any, spread: Placement) -> None:
        one, many = both(make(), spread)
        grads = assert_same_training(one, many, input_ids=tokens(), labels=tokens())
        assert set(grads) == {name for name, _ in many.named_parameters()}

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing(self, make: Any, spread: Placement, reentrant: bool) -> None:
        one, many = both(make(), spread)
        many.gradient_checkpointing_enable({"use_reentrant": reentrant})
        many.enable_input_require_grads()
        grads = assert_same_training(one, many, input_ids=tokens(), labels=tokens())
        assert set(grads) == {name for name, _ in many.named_parameters()}

    def test_saved_and_read_again(self, make: Any, spread: Placement, tmp_path: Path) -> None:
        reference = make()
        model = dispatch(make(), spread)
        model.save_pretrained(tmp_path)
        read = type(model).from_pretrained(tmp_path)
        expected = dict(tensor_names(reference))
        for name, tensor in tensor_names(read):
            assert torch.equal(tensor, expected[name]), name
        assert list(model.state_dict()) == list(reference.state_dict())


def traces(model: nn.Module) -> tuple[int, int]:
    """How many hooks there are, and modules whose class isn't the one of its library."""
    modules = list(model.modules())
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
    classes = [(type(m), vars(sys.modules[type(m).__module__])) for m in modules]
    return hooks, sum(library.get(found.__name__) is not found for found, library in classes)


class TestEncoderDecoder:
    def test_logits_and_gradients(self) -> None:
        one, many = both(t5(), T5)
        inputs = {"input_ids": tokens(), "labels": tokens(length=5)}
        for model in (one, many):
            model.config.dropout_rate = 0.0
        many.gradient_checkpointing_enable({"use_reentrant": True})
        many.enable_input_require_grads()
        for model in (one, many):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        grads = assert_same_training(one, many, **inputs)
        assert set(grads) == {name for name, _ in many.named_parameters()}

    @pytest.mark.parametrize("beams", [1, 3])
    def test_generation(self, beams: int) -> None:
        one, many = both(t5(), T5)
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
        ids = tokens()
        assert many.generate(ids, **options).tolist() == one.generate(ids, **options).tolist()
        assert "_old_forward" not in many.encoder.__dict__  # no hook of accelerate's came in


def test_a_residual_around_a_layer_in_parts() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = hidden + self.attention(hidden)
            return self.mlp(hidden)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), Layer())
    expected = model(torch.ones(1, 2))
    dispatch(model, placement(("vgpu:0", "0"), ("vgpu:1", "1.attention"), ("vgpu:2", "1.mlp")))
    torch.testing.assert_close(model(torch.ones(1, 2)).cpu(), expected)


def test_inputs_may_come_from_another_device() -> None:
    one, many = both(glm(), GLM)
    expected = one(tokens()).logits
    assert close(many(tokens().cpu()).logits, expected)
    assert close(many(tokens().to("vgpu:2")).logits, expected)


def test_outputs_come_back_to_where_the_inputs_are() -> None:
    many = dispatch(glm(), GLM)
    for device in ("cpu", "vgpu:0", "vgpu:1"):
        ids = tokens().to(device)
        outputs = many(ids, labels=ids, output_hidden_states=True)
        found = (outputs.loss, outputs.logits, *outputs.hidden_states)
        assert {str(tensor.device) for tensor in found} == {device}
        assert {str(tensor.device) for tensor in many(ids, return_dict=False)[:1]} == {device}
    stays = dispatch(glm(), GLM, outputs_stay=True)
    assert str(stays(tokens()).logits.device) == "vgpu:2"


def test_what_the_caller_gave_comes_back_as_it_is() -> None:
    many = dispatch(t5(), T5)
    with torch.no_grad():
        encoded = many.encoder(tokens())
        outputs = many(encoder_outputs=encoded, decoder_input_ids=tokens(length=1))
    assert str(encoded.last_hidden_state.device) == "vgpu:1"
    assert outputs.encoder_last_hidden_state is encoded.last_hidden_state
    assert str(outputs.logits.device) == "vgpu:0"


def test_the_cache_lives_where_its_layer_lives() -> None:
    model = dispatch(glm(), GLM)
    cache = model(tokens(), use_cache=True)[CACHE]
    devices = [str(layer.keys.device) for layer in cache.layers]
    assert devices == [GLM.device_of(f"model.layers.{i}") for i in range(NUM_LAYERS)]


def test_the_stage_is_the_current_device_and_the_callers_comes_back() -> None:
    model = dispatch(glm(), GLM)
    backend = torch.get_device_module("vgpu")
    seen: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(backend.current_device()))
    backend.set_device(1)
    try:
        model(tokens())
        assert backend.current_device() == 1
        model.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        assert backend.current_device() == 1
    finally:
        backend.set_device(0)
    assert seen[:NUM_LAYERS] == [0, 1, 1, 2]


def test_hidden_states_are_freed_as_on_one_device() -> None:
    def peaks(spread: Placement) -> list[int]:
        with virtual.gpus([None, None]) as world, torch.no_grad():
            model = dispatch(glm(), spread)
            ids = torch.ones(1, 1000, dtype=torch.long, device="vgpu:0")
            before = [world.memory_allocated(i) for i in (0, 1)]
            for index in (0, 1):
                world.reset_peak_memory_stats(index)
            model.model(ids, use_cache=False)
            return [world.max_memory_allocated(i) - before[i] for i in (0, 1)]

    here = "model.embed_tokens model.rotary_emb model.layers.0"
    rest = "model.layers.2 model.layers.3 model.norm lm_head"
    split = peaks(placement(("vgpu:0", here), ("vgpu:1", f"model.layers.1 {rest}")))
    alone = peaks(Placement(entries=(("", "vgpu:1"), ("lm_head", "vgpu:0"))))
    # The second stage holds what the one device holds, and its own copies of what came in:
    # nothing grows with the number of layers.
    hidden_bytes = 1000 * 32 * 4
    assert split[1] <= alone[1] + hidden_bytes


def test_a_value_changed_between_layers_is_never_stale() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
            return hidden * self.weight + bias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, hidden: Tensor) -> Tensor:
            bias = torch.zeros_like(hidden)
            for block in self.blocks:
                hidden = block(hidden, bias)
                bias += 1
            return hidden

    model = Model()
    dispatch(
        model,
        placement(("vgpu:0", "blocks.0"), ("vgpu:1", "blocks.1 blocks.2 blocks.3")),
    )
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert model(torch.zeros(2, device="vgpu:0")).tolist() == [6.0, 6.0]


def test_dispatching_again_replaces_the_placement() -> None:
    model = dispatch(glm(), GLM)
    expected = model(tokens()).logits
    added = traces(model)
    dispatch(model, GLM)
    assert traces(model) == added
    dispatch(model, Placement(entries=(("", "vgpu:2"),)))
    assert traces(model) == (0, 1), "the model's own inputs alone are moved"
    assert close(model(tokens().to("vgpu:2")).logits, expected)


def test_undispatch_leaves_an_ordinary_model() -> None:
    model = dispatch(t5(), T5)
    plain = t5()
    undispatch(model)
    undispatch(model)  # nothing to do
    assert set(model.__dict__) == set(plain.__dict__)
    assert set(model.encoder.__dict__) == set(plain.encoder.__dict__)
    assert not any(traces(model))


COARSE = [
    (("model", "vgpu:0"), ("lm_head", "vgpu:1")),
    (("lm_head", "vgpu:1"), ("", "vgpu:2"), ("model.layers.2", "vgpu:0")),
    (("model.layers", "vgpu:1"), ("model.embed_tokens.weight", "vgpu:2"), ("", "vgpu:0")),
]


@pytest.mark.parametrize("entries", COARSE)
def test_entries_of_any_size(entries: tuple[tuple[str, str], ...]) -> None:
    one, many = both(glm(), Placement(entries=entries))
    assert close(many(tokens()).logits, one(tokens()).logits)
    twin = copy.deepcopy(many)
    assert close(twin(tokens()).logits, one(tokens()).logits)


def test_transformers_sees_several_devices() -> None:
    model = dispatch(glm(), GLM)
    assert {str(device) for device in model.hf_device_map.values()} == {
        "vgpu:0",
        "vgpu:1",
        "vgpu:2",
    }
    assert str(model.device) == "vgpu:0"
    assert not model._valid_auto_compile_criteria({}, model.generation_config)


def test_a_refused_model_is_as_before() -> None:
    model = dispatch(glm(), GLM)
    with pytest.raises(PlacementError):
        dispatch(model, placement(("vgpu:0", "model")))
    assert model(tokens()).logits.shape == (2, 9, 97)
    with torch.device("meta"):
        empty = glm()
    with pytest.raises(ModelError, match="have no data"):
        dispatch(empty, GLM)
