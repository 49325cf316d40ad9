"""Virtual tensors as torch's users meet them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from closeness import close
from torch import nn

from duoka import virtual
from duoka.virtual.tensor import VirtualTensor

pytestmark = pytest.mark.usefixtures("world")


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def test_values_are_read_as_in_torch() -> None:
    x = torch.tensor([[1.5, 2.0], [3.0, 4.0]], device="vgpu:1")
    assert x.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert x[0, 1].item() == 2.0
    assert float(x[1, 0]) == 3.0
    assert int(x[1, 1]) == 4
    assert bool((x > 1).all())
    assert x.cpu().numpy().sum() == 10.5
    assert x.numpy(force=True).shape == (2, 2)
    assert f"{x[0, 0]:.2f}" == "1.50"
    assert len(x) == 2
    assert [row.sum().item() for row in x] == [3.5, 7.0]


def test_numpy_is_refused_with_the_error_of_cuda() -> None:
    with pytest.raises(TypeError, match=r"can't convert vgpu:0 device type tensor to numpy\. Use"):
        torch.ones(2, device="vgpu:0").numpy()
    with pytest.raises(TypeError, match="can't convert vgpu:0"):
        memoryview(torch.ones(2, device="vgpu:0").__array__())


def test_printing_names_the_device() -> None:
    x = torch.tensor([1.0, 2.0], device="vgpu:1")
    assert repr(x) == "tensor([1., 2.], device='vgpu:1')"
    x.requires_grad_()
    assert repr(x) == "tensor([1., 2.], device='vgpu:1', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert repr(nn.Parameter(x)).startswith("Parameter containing:\ntensor(")


def test_moving_a_module_keeps_ties_and_the_parameters_themselves() -> None:
    model = tied()
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for device in ("vgpu:0", "vgpu:1"):
        model.to(device)
        assert model[0].weight is model[1].weight is weight
        assert isinstance(weight, VirtualTensor)
        assert isinstance(weight, nn.Parameter)
        assert weight.device == torch.device(device)
    model(torch.ones(2, 4, device="vgpu:1")).sum().backward()
    before = weight.tolist()
    optimizer.step()
    assert weight.tolist() != before


def test_a_module_moves_back() -> None:
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    model.to("vgpu:0").to("cpu")
    assert type(model.weight) is nn.Parameter
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_to_empty_and_half() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model = model.to_empty(device="vgpu:1").half()
    assert model.weight.device == torch.device("vgpu:1")
    assert model.weight.dtype == torch.float16
    assert model.weight.untyped_storage().nbytes() == 12


def test_modules_are_built_on_a_device() -> None:
    torch.manual_seed(3)
    with torch.device("vgpu:1"):
        model = nn.Linear(3, 2)
    torch.manual_seed(3)
    assert torch.equal(model.weight.cpu(), nn.Linear(3, 2).weight)


def test_parameters_can_be_made_and_assigned() -> None:
    parameter = nn.Parameter(torch.ones(2, device="vgpu:0"))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    other = torch.arange(3.0, device="vgpu:1")
    parameter.data = other
    assert parameter.shape == (3,)
    assert parameter.device == torch.device("vgpu:1")
    assert parameter.tolist() == [0, 1, 2]
    other.add_(1)
    assert parameter.tolist() == [1, 2, 3]


def test_deepcopy_keeps_ties_and_shared_storage(world: virtual.World) -> None:
    model = tied().to("vgpu:0")
    used = world.memory_allocated(0)
    model.note = torch.zeros(8, device="vgpu:0")
    model.part = model.note[2:4]
    clone = copy.deepcopy(model)
    assert clone[0].weight is clone[1].weight
    assert isinstance(clone[0].weight, nn.Parameter)
    assert clone.part.storage_id == clone.note.storage_id != model.note.storage_id
    assert world.memory_allocated(0) == 2 * (used + 512)
    assert torch.equal(clone[0].weight.cpu(), model[0].weight.cpu())
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model[0].weight * 2)


def test_python_attributes_stay_on_a_tensor() -> None:
    x = torch.ones(2, device="vgpu:0")
    x.owner = "layer"  # type: ignore[attr-defined]
    assert x.owner == "layer"  # type: ignore[attr-defined]
    assert not hasattr(x + 1, "owner")
    assert copy.deepcopy(x).owner == "layer"  # type: ignore[attr-defined]


def test_pointers_tell_storages_apart() -> None:
    x, y = torch.ones(4, device="vgpu:0"), torch.ones(4, device="vgpu:0")
    assert x.data_ptr() != y.data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.empty(0, device="vgpu:0").data_ptr() == 0
    assert x.untyped_storage().size() == len(x.untyped_storage()) == 16


@pytest.mark.parametrize("change", [
    lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.squeeze_(), lambda x: x.resize_(5),
    lambda x: x.transpose_(0, 1), lambda x: x.as_strided_((2,), (1,)), lambda x: x.zero_(),
    lambda x: x.relu_(), lambda x: x.copy_(torch.zeros(2, 3)), lambda x: x.clamp_(max=1),
    lambda x: x.masked_fill_(x > 2, 0), lambda x: x.scatter_(1, x[:, :1].long() * 0, 4.0),
    lambda x: x.index_add_(0, torch.tensor([1]).to(x.device), x[:1] + 0),
    lambda x: x.__setitem__((slice(None), 1), 9.0),
])  # fmt: skip
def test_in_place_operations_equal_the_cpu(change: Callable[[torch.Tensor], object]) -> None:
    expected = torch.arange(6.0).view(2, 3)
    x = expected.to("vgpu:0")
    change(expected)
    change(x)
    assert x.shape == expected.shape
    assert x.stride() == expected.stride()
    assert x.flatten().tolist()[:2] == expected.flatten().tolist()[:2]


@pytest.mark.parametrize("operation", [
    lambda z: z.conj(), lambda z: z.conj() * 2, lambda z: z.conj().imag, lambda z: z.conj() @ z,
    lambda z: torch.view_as_real(z.conj().resolve_conj()), lambda z: z.conj()[1],
    lambda z: torch.cat([z.conj(), z]), lambda z: z.conj().clone(),
])  # fmt: skip
def test_complex_numbers(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert operation(z.to("vgpu:0")).tolist() == operation(z).tolist()


@pytest.mark.parametrize("make", [
    lambda device: torch.arange(3, 30, 4, device=device),
    lambda device: torch.linspace(0, 1, 5, device=device),
    lambda device: torch.eye(3, device=device),
    lambda device: torch.full((2, 2), 7, device=device),
    lambda device: torch.ones(2, 3, dtype=torch.bool, device=device).tril(),
    lambda device: torch.tril_indices(3, 3, device=device),
    lambda device: torch.zeros(3, device=device).new_tensor([1.0, 2.0]),
    lambda device: torch.as_tensor([1, 2], device=device),
    lambda device: torch.asarray([1, 2], device=device),
    lambda device: torch.hann_window(5, device=device),
    lambda device: torch.scalar_tensor(3.0, device=device),
    lambda device: torch.zeros_like(torch.ones(2), device=device),
    lambda device: torch.nn.functional.one_hot(torch.arange(3, device=device)),
])  # fmt: skip
def test_factories_equal_the_cpu(make: Callable[[str], torch.Tensor]) -> None:
    made = make("vgpu:2")
    assert made.device == torch.device("vgpu:2")
    assert made.tolist() == make("cpu").tolist()


@pytest.mark.parametrize("make", [
    lambda **options: torch.randn(5, **options),
    lambda **options: torch.rand(5, **options),
    lambda **options: torch.randint(0, 100, (5,), **options),
    lambda **options: torch.randperm(9, **options),
    lambda **options: torch.normal(0.0, 1.0, (5,), **options),
])  # fmt: skip
def test_random_numbers_are_those_of_the_cpu(make: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(5)
    expected = make()
    torch.manual_seed(5)
    assert make(device="vgpu:0").tolist() == expected.tolist()
    expected = make(generator=torch.Generator().manual_seed(5))
    drawn = make(device="vgpu:0", generator=torch.Generator().manual_seed(5))
    assert drawn.tolist() == expected.tolist()


def test_sampling_and_dropout_follow_the_seed() -> None:
    weights = torch.rand(4, 10)
    torch.manual_seed(1)
    expected = torch.multinomial(weights, 3), weights.clone().exponential_(), weights.bernoulli()
    torch.manual_seed(1)
    x = weights.to("vgpu:0")
    drawn = torch.multinomial(x, 3), x.clone().exponential_(), x.bernoulli()
    assert [a.tolist() for a in drawn] == [b.tolist() for b in expected]
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(1)
    assert kept.tolist() == torch.nn.functional.dropout(weights, 0.5).tolist()


def test_no_grad_and_inference_mode() -> None:
    x = torch.ones(2, 2, device="vgpu:0", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = torch.nn.functional.linear(x[None], x, x[0]).softmax(-1).reshape(-1)
        assert y.is_inference()
        assert y.sum().item() == 2
    with pytest.raises(RuntimeError, match="nference"):
        y * x.sum()


def test_gradients_equal_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    tokens = torch.randint(0, 9, (2, 5))
    model(tokens).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.to("vgpu:1")
    model(tokens.to("vgpu:1")).square().mean().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.device == torch.device("vgpu:1")
        assert grad is not None
        assert close(parameter.grad, grad)


def test_gradients_flow_between_devices() -> None:
    x = torch.ones(3, device="vgpu:0", requires_grad=True)
    y = x.to("vgpu:1") * 2
    z = (y.to("cpu") * 3).to("vgpu:2")
    z.sum().backward()
    assert x.grad is not None
    assert x.grad.device == torch.device("vgpu:0")
    assert x.grad.tolist() == [6, 6, 6]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_optimizers_step_as_on_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "vgpu:1"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results.append(model.weight.detach().cpu())
    assert torch.allclose(*results, atol=1e-6)


def test_optimizers_work_on_lists_as_on_cuda(world: virtual.World) -> None:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8)).to("vgpu:0")
    for layer in model:
        layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    before = world.memory_allocated(0)
    world.reset_peak_memory_stats(0)
    optimizer.step()
    # The denominators of all parameters exist at the same time.
    assert world.max_memory_allocated(0) - before >= 8 * 64 * 64 * 4


def test_copies_share_or_do_not() -> None:
    x = torch.nn.Parameter(torch.ones(3, device="vgpu:0"))
    shallow, deep = copy.copy(x), copy.deepcopy(x)
    with torch.no_grad():
        x.fill_(2)
    assert shallow.tolist() == [2, 2, 2]
    assert deep.tolist() == [1, 1, 1]
    assert isinstance(shallow, torch.nn.Parameter)


def test_gradient_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(4, device="vgpu:1", requires_grad=True)
    layer = nn.Dropout(0.5)
    for reentrant in (False, True):
        x.grad = None
        checkpoint(lambda x: layer(x.sin()), x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        assert x.grad.device == torch.device("vgpu:1")


def test_multihead_attention_convolution_and_lstm() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    for layer in (
        nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True),
        nn.Conv1d(5, 4, 3), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    ):  # fmt: skip
        arguments = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
        with torch.no_grad():
            expected = layer(*arguments)
        layer.to("vgpu:0")
        found = layer(*[item.to("vgpu:0") for item in arguments])
        if isinstance(expected, tuple):
            expected, found = expected[0], found[0]
        assert torch.allclose(found.cpu(), expected, atol=1e-5)
