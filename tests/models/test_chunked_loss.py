"""The head and the loss in chunks; those of all families are in `matrix.losses`."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import tiny
import torch
from matrix.losses import assert_alike, learn, note_chunks
from staging import differences, learn_in_stages, learn_whole, placement_of
from torch import Tensor, nn

from duoka import Placement, models, virtual
from duoka.forecast import workload
from duoka.forecast.workload import Training
from duoka.models import make_trainable
from duoka.models.chunked_loss import LazyLogits, chunk_loss, chunked_head, whole_logits
from duoka.runtime.dispatch.dispatch import dispatch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    return note_chunks(monkeypatch)


@pytest.mark.parametrize(
    ("name", "head"), [("llama", "lm_head"), ("gemma", "model.embed_tokens"), ("gpt2", None)]
)
def test_what_is_trained_decides_what_gets_gradients(name: str, head: str | None) -> None:
    """The head alone, or all but the head."""
    model = families.build(name).train()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith(head) if head else "wte" not in key)
    expected = learn(model)
    chunk_loss(model)
    assert_alike(expected, learn(model), 1e-6)


def test_adapters_of_the_head(chunks: list[slice]) -> None:
    found = []
    for is_chunked in (False, True):
        model = families.build("llama")
        torch.manual_seed(1)
        training = Training(method="lora", lora_rank=2, lora_targets=("lm_head", "q_proj"))
        make_trainable(model, training, torch.float32)
        models.initialize_adapters(model, 3)
        nn.init.normal_(model.lm_head.lora_B["default"].weight, std=0.1)
        if not is_chunked:
            with whole_logits(model):
                found.append(learn(model))
            assert not chunks
        else:
            found.append(learn(model))
    assert chunks
    assert sum("lm_head" in name for name in found[0]) == 2
    assert_alike(*found, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype: torch.dtype, chunks: list[slice]) -> None:
    model = families.build("llama").to(dtype).train()
    expected = learn(model)
    chunk_loss(model)
    assert_alike(expected, learn(model), 2e-2)
    assert chunks


def test_autocast_is_on_in_the_backward_pass_as_well(chunks: list[slice]) -> None:
    model = families.build("gemma2").train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = learn(model)
    chunk_loss(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = learn(model)
    assert_alike(expected, found, 2e-2)
    assert chunks


def test_the_number_of_items_divides_the_sum(chunks: list[slice]) -> None:
    model = families.build("qwen2").train()
    expected = learn(model, num_items_in_batch=torch.tensor(5))
    chunk_loss(model)
    assert_alike(expected, learn(model, num_items_in_batch=torch.tensor(5)), 1e-6)
    assert chunks


def test_a_batch_without_labels_has_the_loss_that_torch_gives() -> None:
    model = families.build("llama").train()
    chunk_loss(model)
    ids = families.inputs(model)["input_ids"]
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    assert loss.isnan()


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_two_gpus(name: str, chunks: list[slice]) -> None:
    model = families.build(name).train()
    expected = learn(model)
    chunk_loss(model)
    head = {} if name == "gemma" else {"lm_head": "vgpu:1"}
    layers = {"model.layers.0": "vgpu:0", "model.layers.1": "vgpu:1", "model.norm": "vgpu:1"}
    places = {"model.embed_tokens": "vgpu:0", "model.rotary_emb": "vgpu:0", **layers, **head}
    places |= {"lm_head": "vgpu:0"} if name == "gemma" else {}
    with virtual.gpus([None, None], data="cpu"):
        dispatch(model, Placement(entries=tuple(places.items())))
        assert_alike(expected, learn(model), 1e-5)
    assert chunks


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_stages(name: str, chunks: list[slice]) -> None:
    model = families.build(name).train()
    ids = families.inputs(model)["input_ids"]
    batches = [{"input_ids": ids, "labels": ids, "use_cache": False}] * 2
    placement = placement_of(model, batches[0], 2)
    expected = learn_whole(model, batches)
    chunk_loss(model)
    assert differences(expected, learn_in_stages(model, placement, batches, "1f1b")) == []
    assert chunks


def test_one_chunk_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bit, in 32, and the gradients of both."""
    tokens, words, chunk = 512, 30_000, 64
    monkeypatch.setattr(workload, "_LOSS_CHUNK_TOKENS", chunk)
    model = models.build({**tiny.CONFIGS["glm"], "vocab_size": words}, dtype=torch.bfloat16)
    make_trainable(model, Training(gradient_checkpointing=True), torch.bfloat16)
    with virtual.gpus([None], data="meta") as world:
        dispatch(model, Placement(entries=(("", "vgpu:0"),)), empty=True)
        before = world.memory_allocated(0)
        ids = torch.ones((1, tokens), dtype=torch.long, device="vgpu:0")
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        peak = world.max_memory_allocated(0) - before
        assert 12 * chunk * words < peak < 20 * chunk * words
        output.logits.sum()
        assert world.max_memory_allocated(0) - before > 2 * tokens * words


def head_of(kind: Any = nn.Linear) -> tuple[Any, Tensor]:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = kind(3, 5)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    return Model(), torch.randn(2, 7, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("use", "is_lazy"),
    [
        (lambda logits: logits[:, :-1].contiguous(), True),
        (lambda logits: logits[..., :-1, :].reshape(-1, 5), True),
        (lambda logits: logits[:, -1, :], True),
        (lambda logits: logits[0], True),
        (lambda logits: torch.tanh(logits / 30) * 30, True),
        (lambda logits: logits.to(torch.bfloat16).float(), True),
        (lambda logits: logits[..., :3], False),
        (lambda logits: logits[:, :, 2], False),
        (lambda logits: logits[logits > 0], False),
        (lambda logits: logits[None], False),
        (lambda logits: logits.view(2, -1), False),
        (lambda logits: logits.reshape(7, 10), False),
        (lambda logits: logits + torch.arange(5), False),
        (lambda logits: logits.softmax(-1), False),
        (lambda logits: torch.stack([logits, logits]), False),
        (lambda logits: logits.transpose(0, 2), False),
        (lambda logits: logits.detach(), False),
    ],
)
def test_what_is_done_to_logits_gives_what_it_gives_to_any(use: Any, is_lazy: bool) -> None:
    model, hidden = head_of()
    expected = use(model.head(hidden))
    chunk_loss(model)
    logits = model.head(hidden)
    assert isinstance(logits, LazyLogits)
    result = use(logits)
    assert isinstance(result, LazyLogits) == is_lazy
    assert (result.shape, result.dtype, result.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    )
    # Fewer rows may take another kernel of the processor's.
    torch.testing.assert_close((result * 1.0).add(0), expected * 1.0)


def test_what_was_written_into_logits_stays_there() -> None:
    model, hidden = head_of()
    chunk_loss(model)
    logits = model.head(hidden)
    logits[..., 1] = -torch.inf
    logits *= 2
    assert logits[..., 1].isinf().all()
    assert logits.float().view(-1, 5).softmax(-1)[:, 1].eq(0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"weight": torch.arange(5.0)},
    ],
)
def test_rare_losses_are_torchs(options: dict[str, Any], chunks: list[slice]) -> None:
    model, hidden = head_of()
    target = torch.randint(5, (14,))
    expected = nn.functional.cross_entropy(model.head(hidden).view(-1, 5), target, **options)
    chunk_loss(model)
    loss = nn.functional.cross_entropy(model.head(hidden).view(-1, 5), target, **options)
    assert loss.equal(expected)
    assert not chunks


def test_losses_of_rows(chunks: list[slice]) -> None:
    """Each has a gradient of its own."""
    model, hidden = head_of()
    target, results = torch.tensor([-100, *range(5), *range(5), 0, 1, 2]), []
    for is_chunked in (False, True):
        if is_chunked:
            chunk_loss(model)
        leaf = hidden.detach().requires_grad_()
        logits = model.head(leaf).view(-1, 5)
        losses = nn.functional.cross_entropy(logits, target, reduction="none")
        weights = torch.arange(14.0)
        results.append([losses, *torch.autograd.grad(losses @ weights, [leaf, model.head.weight])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(chunks) == 8


def test_a_wrong_number_of_labels_is_refused_as_ever() -> None:
    model, hidden = head_of()
    chunk_loss(model)
    with pytest.raises(ValueError, match=r"Expected input batch_size \(14\)"):
        nn.functional.cross_entropy(model.head(hidden).view(-1, 5), torch.zeros(15).long())


def test_without_gradients(chunks: list[slice]) -> None:
    model = families.build("llama")
    ids = families.inputs(model)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
        chunk_loss(model)
        output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.loss, expected)
    assert len(chunks) == 4
    assert not output.logits.softmax(-1).requires_grad


def test_a_copy_has_a_head_of_its_own() -> None:
    model, hidden = head_of()
    chunk_loss(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.head.weight)
    assert chunked_head(copied).head is copied.head  # type: ignore[union-attr]
    assert not copied.head(hidden).sum(-1).equal(model.head(hidden).sum(-1))


def test_a_head_that_drops_computes_all() -> None:
    """A chunk that is computed again would drop others."""
    model, hidden = head_of(lambda *sizes: nn.Sequential(nn.Dropout(0.1), nn.Linear(*sizes)))
    model.head.out_features = 5
    chunk_loss(model)
    assert not isinstance(model.head(hidden), LazyLogits)


def test_heads_that_are_no_linear_layers_are_left_alone() -> None:
    for model in (nn.Linear(2, 2), head_of(nn.Embedding)[0]):
        chunk_loss(model)
        assert chunked_head(model) is None
