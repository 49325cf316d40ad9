"""What is known on GPUs without numbers, and the error where it isn't."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from duoka import virtual
from duoka.models.cache_argument import CACHE
from duoka.virtual import UnknownValueError
from duoka.virtual.known_values import KNOWN_LIMIT_BYTES, unknown_value

pytestmark = pytest.mark.usefixtures("meta_world")


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="vgpu:0")


def test_memory_is_counted_without_numbers(meta_world: virtual.World) -> None:
    weight = torch.empty(2**20, 2**20, dtype=torch.bfloat16, device="vgpu:1")
    assert meta_world.memory_allocated(1) == 2**41
    assert weight[0, :5].storage_id == weight.storage_id  # type: ignore[attr-defined]
    del weight
    assert meta_world.memory_allocated(1) == 0


def test_positions_and_masks_are_known() -> None:
    positions = torch.arange(10, device="vgpu:0")
    assert positions.sum().item() == 45
    mask = torch.ones(2, 5, dtype=torch.long, device="vgpu:0")
    mask[0, :2] = 0
    assert not bool(mask.all())
    assert mask.sum(-1).tolist() == [3, 5]
    assert (mask.cumsum(-1) - 1).max().item() == 4
    assert positions.to("vgpu:1").tolist() == list(range(10))
    assert torch.tensor([3, 4], device="vgpu:0").tolist() == [3, 4]
    assert mask.bool().nonzero().shape == (8, 2)
    assert mask.cpu().tolist() == mask.tolist()
    floats = (1.0 - mask.float()) * torch.finfo(torch.float32).min
    assert floats[0, 0].item() == torch.finfo(torch.float32).min
    assert torch.where(mask == 0)[1].tolist() == [0, 1]


def test_a_read_of_an_unknown_value_names_its_line() -> None:
    hidden = weights(2, 3)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(UnknownValueError) as error:
        hidden.sum().item()
    assert f"{__file__}:{line}" in str(error.value)


@pytest.mark.parametrize("read", [
    lambda x: bool(x.sum() > 0), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.nonzero(),
    lambda x: x[x > 0], lambda x: x.argmax().item(), lambda x: torch.equal(x, x + 1),
    lambda x: x.masked_select(x > 0), lambda x: x.unique(), lambda x: int(x[0, 0]),
    lambda x: torch.zeros(2, 3).copy_(x), lambda x: torch.where(x > 0)[0],
])  # fmt: skip
def test_unknown_values_are_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(UnknownValueError) as error:
        read(weights(2, 3))
    assert f"({__file__}:" in str(error.value)


def test_known_values_meet_unknown_ones() -> None:
    hidden = weights(2, 5, 8)
    tokens = torch.tensor([[1, 2, 3, 4, 0]] * 2, device="vgpu:0")
    mask = tokens != 0
    assert torch.nn.functional.embedding(tokens, weights(10, 8)).shape == (2, 5, 8)
    assert (hidden * mask[..., None]).shape == (2, 5, 8)
    assert hidden[mask].shape == (8, 8)
    assert hidden[:, torch.tensor([0, 1])].shape == (2, 2, 8)
    assert hidden.masked_fill(~mask[..., None], 0.0).shape == (2, 5, 8)
    assert hidden.gather(1, tokens[..., None].expand(-1, -1, 8)).shape == (2, 5, 8)
    hidden[mask] = 0.0
    hidden[hidden > 0] = 0.0
    hidden.masked_scatter_(mask[..., None].expand_as(hidden), weights(64))
    assert (hidden * torch.tensor(2.0)).shape == (2, 5, 8)
    assert torch.where(mask[..., None], hidden, torch.tensor(0.0)).shape == (2, 5, 8)
    assert mask.sum().item() == 8


def test_writing_unknown_values_makes_everything_that_shares_them_unknown() -> None:
    counts = torch.zeros(4, dtype=torch.long, device="vgpu:0")
    view = counts[1:]
    assert view.tolist() == [0, 0, 0]
    counts[0] = weights(3).argmax()
    for tensor in (counts, view, view[1:]):
        with pytest.raises(UnknownValueError):
            tensor.tolist()
    later = counts.view(2, 2)
    assert later.storage_id == counts.storage_id  # type: ignore[attr-defined]
    counts.add_(1)


def test_large_index_tensors_are_not_kept() -> None:
    num_elements = KNOWN_LIMIT_BYTES // 8
    assert torch.arange(num_elements, device="vgpu:0")[-1].item() == num_elements - 1
    with pytest.raises(UnknownValueError):
        torch.arange(num_elements + 1, device="vgpu:0")[-1].item()
    wide = torch.arange(8192, device="vgpu:0")
    scores_mask = wide[:, None] >= wide
    assert scores_mask.shape == (8192, 8192)
    with pytest.raises(UnknownValueError):
        scores_mask.all().item()


def test_random_integers_are_known_and_sampled_tokens_are_not() -> None:
    assert 0 <= torch.randint(0, 5, (2,), device="vgpu:0").max().item() < 5
    with pytest.raises(UnknownValueError):
        torch.multinomial(weights(2, 5).softmax(-1), 1).tolist()


def test_weights_come_from_meta_and_from_the_cpu() -> None:
    assert torch.empty(3, 4, device="meta").to("vgpu:0").shape == (3, 4)
    moved = torch.randn(3, 4).to("vgpu:0")
    with pytest.raises(UnknownValueError):
        moved.sum().item()


def test_backward_runs_without_numbers(meta_world: virtual.World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    model.to_empty(device="vgpu:1")
    labels = torch.tensor([0, 1, 2], device="vgpu:1")
    torch.nn.functional.cross_entropy(model(torch.ones(3, 8, device="vgpu:1")), labels).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert model[0].weight.grad is not None
    assert meta_world.memory_allocated(0) == 0


def test_a_model_runs_on_meta_while_another_world_computes() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to_empty(device="vgpu:0")
    virtual.set_gpus([None])
    done = []

    def compute() -> None:
        x = torch.ones(2, 2, device="vgpu:0")
        done.append((x @ x).sum().item())

    thread = threading.Thread(target=compute)
    thread.start()
    tokens = torch.randint(0, 50, (2, 6), device="vgpu:0")
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        out = model(tokens, attention_mask=mask, use_cache=True)
        longer = torch.cat([mask, mask[:, :1]], 1)
        out = model(tokens[:, :1], attention_mask=longer, **{CACHE: out[CACHE]})
    thread.join()
    assert done == [8.0]
    assert out.logits.shape == (2, 1, 50)
    assert out[CACHE].get_seq_length() == 7


def test_the_same_memory_with_and_without_numbers() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    peaks = []
    for data in ("cpu", "meta"):
        with virtual.gpus([None], data=data) as world:
            model = LlamaForCausalLM(config).to("vgpu:0")
            tokens = torch.arange(24, device="vgpu:0").view(2, 12)
            mask = torch.ones_like(tokens)
            mask[0, :3] = 0
            model(tokens, attention_mask=mask, labels=tokens).loss.backward()
            peaks.append((world.max_memory_allocated(0), world.max_memory_reserved(0)))
            del model
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("device", [None, "vgpu:0"])
def test_a_tensor_of_numbers_on_a_gpu(device: str | None) -> None:
    found = torch.arange(5, device="vgpu:0")
    made = torch.tensor([[found.max(), found[1]], [7, found.min()]], device=device)
    assert made.tolist() == [[4, 1], [7, 0]]
    assert made.device == torch.device(device or "cpu")
    with pytest.raises(UnknownValueError):
        torch.tensor([weights(3).max()], device=device)


def test_an_unknown_mask_selects_all_where_choices_are_even() -> None:
    """As the mask of GLM-5.3-Flash's pools does, whose keys and validity are one tensor."""
    with virtual.gpus([None], data="even"):
        keys = torch.empty(2, 6, 3, device="vgpu:0")
        is_valid = keys[..., 0] > 0
        assert keys[:, is_valid.any(0)].shape == (2, 6, 3)
        assert keys[is_valid].shape == (12, 3)
    with virtual.gpus([None], data="meta"):
        keys = torch.empty(2, 6, 3, device="vgpu:0")
        with pytest.raises(UnknownValueError, match="with a mask"):
            keys[keys > 0]


def test_choices_are_even_where_they_are_asked_for() -> None:
    with virtual.gpus([None], data="even"):
        scores = torch.empty(6, 4, device="vgpu:0")
        _, chosen = scores.softmax(-1).topk(2, dim=-1)
        assert chosen.flatten().bincount(minlength=4).tolist() == [3, 3, 3, 3]
        with pytest.raises(UnknownValueError):
            scores.argmax(-1).tolist()


def test_a_run_is_given_as_few_values_as_it_asks_for() -> None:
    def run(data: str) -> str:
        if data in refused:
            raise unknown_value("a read")
        return data

    refused: tuple[str, ...] = ()
    assert virtual.with_values(run, lambda: 2**40) == "meta"
    refused = ("meta",)
    assert virtual.with_values(run, lambda: 2**40) == "even"
    refused = ("meta", "even")
    assert virtual.with_values(run, lambda: 1) == "cpu"
    with pytest.raises(UnknownValueError):
        virtual.with_values(run, lambda: 2**40)
