"""What a quantized weight takes, and what it computes, on the processor and on virtual GPUs."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka import virtual
from duoka.errors import ModelError, UsageError
from duoka.models.quantization import (
    Scheme,
    computes_in,
    empty_weight,
    fill_rows,
    move_weight,
    num_bytes,
    parts,
    quantize,
    takes_rows,
)
from duoka.models.quantization.weights import let_compute_in, require
from duoka.runtime.load.fill import Quantizer

ROWS, COLUMNS = 208, 1152  # int4's groups are 128 long, and its rows padded to 2048
SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "nf4")
ERRORS = {"int8": 0.012, "int4": 0.12, "nf4": 0.11}
DEVICES = ("cpu", "vgpu:0")
BYTES = {
    ("int8", "cpu"): ROWS * COLUMNS + 5 * ROWS,
    ("int8", "vgpu:0"): ROWS * COLUMNS + 5 * ROWS,
    ("int4", "cpu"): ROWS * COLUMNS // 2 + ROWS * COLUMNS // 128 * 4,
    ("int4", "vgpu:0"): ROWS * 2048 // 2 + ROWS * 2048 // 128 * 4,
    ("nf4", "cpu"): ROWS * COLUMNS // 2 + ROWS * COLUMNS // 64 * 4,
    ("nf4", "vgpu:0"): ROWS * COLUMNS // 2 + ROWS * COLUMNS // 64 * 4,
}


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([None])


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.manual_seed(0)).bfloat16() * 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_and_bytes(weight: Tensor, scheme: Scheme, device: str) -> None:
    made = quantize(weight.to(device), scheme)
    given = torch.randn(7, COLUMNS, generator=torch.manual_seed(1)).bfloat16()
    right = F.linear(given, weight).float()
    for rows in (7, 1):
        found = F.linear(given[:rows].to(device), made).cpu().float()
        assert (found - right[:rows]).norm() / right[:rows].norm() < ERRORS[scheme]
    assert made.shape == weight.shape
    assert num_bytes(made) == BYTES[scheme, device]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_virtual_gpus_compute_what_the_processor_does(weight: Tensor, scheme: Scheme) -> None:
    given = torch.randn(5, COLUMNS, generator=torch.manual_seed(2)).bfloat16()
    here = F.linear(given, quantize(weight, scheme)).float()
    there = F.linear(given.to("vgpu:0"), quantize(weight.to("vgpu:0"), scheme)).cpu().float()
    assert (here - there).norm() / here.norm() < 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_by_themselves_are_those_of_the_whole(
    weight: Tensor, scheme: Scheme, device: str
) -> None:
    whole = quantize(weight.to(device), scheme)
    made = empty_weight(quantize(weight.to("meta"), scheme), torch.device(device))
    for start, stop in ((128, ROWS), (0, 64), (64, 128)):
        assert takes_rows(made, start, stop)
        fill_rows(made, start, weight[start:stop], made.device)
    for name, part in parts(whole).items():
        assert torch.equal(parts(made)[name].cpu(), part.cpu()), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pieces_in_any_order_make_the_whole(weight: Tensor, scheme: Scheme) -> None:
    made = empty_weight(quantize(weight.to("meta"), scheme), torch.device("cpu"))
    quantizer = Quantizer()
    boxes = [((r, min(r + 90, ROWS)), (c, c + 576)) for c in (576, 0) for r in (180, 0, 90)]
    for box in boxes:
        (top, bottom), (left, right) = box
        quantizer.put("weight", made, box, weight[top:bottom, left:right])
    whole = quantize(weight, scheme)
    assert all(torch.equal(parts(made)[name], part) for name, part in parts(whole).items())


def test_weights_of_4_bit_stay_with_their_kind_of_device(weight: Tensor) -> None:
    with pytest.raises(ModelError, match="different layouts"):
        move_weight(quantize(weight.to("vgpu:0"), "int4"), torch.device("cpu"))
    here = move_weight(quantize(weight.to("vgpu:0"), "nf4"), torch.device("cpu"))
    assert {part.device.type for part in parts(here).values()} == {"cpu"}


@pytest.mark.parametrize(
    ("scheme", "package"), [("int4", "torchao"), ("int8", "torchao"), ("nf4", "bitsandbytes")]
)
def test_a_missing_package_is_named(
    scheme: Scheme, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec

    def gone(name: str) -> object:
        return None if name == package else there(name)

    monkeypatch.setattr("duoka.base.requirements.find_spec", gone)
    with pytest.raises(UsageError, match=f"need {package}") as caught:
        require(scheme)
    assert "pip install" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("scheme", "where", "name", "tested"),
    [
        ("int4", "torchao.quantization.utils", "groupwise_affine_quantize_tensor", "torchao 0.18"),
        ("int8", "torchao.quantization", "PerRow", "torch 2.11 and 2.13 with torchao 0.18"),
    ],
)
def test_what_a_package_lacks_is_named_with_the_tested_versions(
    scheme: Scheme, where: str, name: str, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(scheme)
    monkeypatch.delattr(f"{where}.{name}")
    with pytest.raises(UsageError, match=f"quantization fails with torch .*{name}") as caught:
        require(scheme)
    assert tested in str(caught.value.hint)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_copy_knows_what_it_was_made_from(weight: Tensor, scheme: Scheme) -> None:
    made = nn.Parameter(quantize(weight.to("meta"), scheme), requires_grad=False)
    let_compute_in(made, torch.float16)
    copied = copy.deepcopy(made)
    assert type(copied) is type(made)
    assert computes_in(copied) == torch.float16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fewer_rows_at_once_where_memory_is_short(scheme: Scheme) -> None:
    weight = torch.randn(1024, 1024, generator=torch.manual_seed(3)).bfloat16()
    whole = quantize(weight.to("vgpu:0"), scheme)
    sketch = quantize(weight.to("meta"), scheme)
    with virtual.gpus([8 * 2**20], data="cpu"):
        made = empty_weight(sketch, torch.device("vgpu:0"))
        fill_rows(made, 0, weight, made.device)
        for name, part in parts(whole).items():
            assert torch.equal(parts(made)[name].cpu(), part.cpu()), name
        with pytest.raises(torch.OutOfMemoryError):
            quantize(weight.to("vgpu:0"), scheme)
