"""Products and forward passes of quantized experts, held against those of dequantized ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quantized_experts import (
    build_experts,
    dequantize,
    distance,
    expert_classes,
    modules_with_experts,
    quantize_experts,
    with_dequantized_experts,
)
from torch import Tensor
from turns import in_turn

from duoka import virtual
from duoka.models.quantization import ExpertStack, Scheme, experts, quantize_model
from duoka.models.quantization.stacked import quantize_stack

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "nf4")
LAYOUTS = [(scheme, False) for scheme in SCHEMES]
MODULES = dict(modules_with_experts())
EXPERTS, ROWS, TOP_K = 8, 48, 2
# One token; as many pairs of token and expert as are selected token by token; sorted tiles, of
# which one expert has more than a tile holds.
TOKENS = (1, 4, 5, 150)
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def stack_of(columns: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, ROWS, columns, dtype=dtype) * 0.05


def routing(tokens: int) -> Tensor:
    """Choose two different experts for each token; most tokens choose the expert 3."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[: tokens // 2, 3] = 2.0
    return scores.topk(TOP_K).indices


def expected_of(inputs: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Multiply by plain weights [experts, rows, columns], in float32."""
    if len(inputs) == len(index):
        inputs = inputs.repeat_interleave(TOP_K, dim=0)
    return torch.einsum("pc,prc->pr", inputs.float(), weights.float()[index.flatten()])


def direct(inputs: Tensor, stack: ExpertStack, index: Tensor) -> Tensor:
    """Compute as on a GPU; the operator computes on the data behind a virtual GPU's tensors."""
    tensors, name = list(stack.tensors.values()), stack.weight_class.__name__
    return experts._experts_linear(inputs, index, tensors, name, stack.sizes[0])


@pytest.mark.parametrize("device", ["cpu", "vgpu:0"])
@pytest.mark.parametrize(("scheme", "trains"), [*LAYOUTS, ("int8", True)])
def test_products_are_those_of_dequantized_experts(
    scheme: Scheme, device: str, trains: bool
) -> None:
    with virtual.gpus([None], data="cpu"):
        for dtype in (torch.bfloat16, torch.float32):
            for columns in (128, 64) if scheme == "nf4" else (128, 96):
                plain = stack_of(columns, dtype).to(device)
                stack = quantize_stack(plain, scheme, trains=trains)
                # Tensor cores compute in bfloat16.
                in_bfloat16 = device != "cpu" and scheme != "nf4" and not trains
                rounding = ROUNDING[torch.bfloat16 if in_bfloat16 else dtype]
                for tokens in TOKENS:
                    index = routing(tokens)
                    for count in (tokens, tokens * TOP_K):  # shared by a token's experts, and own
                        inputs = torch.randn(count, columns, dtype=dtype)
                        right = expected_of(inputs, dequantize(stack), index)
                        inputs, index = inputs.to(device), index.to(device)
                        results = [experts.linear(inputs, stack, index)]
                        if device != "cpu":
                            results.append(direct(inputs, stack, index))
                        for result in results:
                            assert (result.shape, result.dtype) == ((tokens * TOP_K, ROWS), dtype)
                            assert distance(result, right) < rounding
                        index = index.cpu()


def test_products_of_glm_sized_experts() -> None:
    """1408 columns are eleven tiles of tensor cores, with groups of 128 in int4 and int8."""
    with virtual.gpus([None], data="cpu"):
        for scheme in SCHEMES:
            stack = quantize_stack(stack_of(1408, torch.bfloat16).to("vgpu:0"), scheme)
            for tokens in (1, 9):
                inputs, index = torch.randn(tokens, 1408, dtype=torch.bfloat16), routing(tokens)
                right = expected_of(inputs, dequantize(stack), index)
                result = direct(inputs.to("vgpu:0"), stack, index.to("vgpu:0"))
                assert distance(result, right) < 1e-2


@pytest.mark.parametrize(("scheme", "trains"), [*LAYOUTS, ("int8", True), ("nf4", True)])
def test_buffers_are_those_that_are_counted(scheme: Scheme, trains: bool) -> None:
    """What a product allocates beside its result is counted, and is less than all experts."""
    with virtual.gpus([None], data="cpu"):
        for columns, rows in ((512, 512), (2048, 512), (96 if scheme == "int8" else 64, 1024)):
            for dtype in (torch.bfloat16, torch.float16):
                hold_buffers(scheme, trains, (columns, rows, dtype))


def hold_buffers(scheme: Scheme, trains: bool, form: tuple[int, int, torch.dtype]) -> None:
    """Compare the peak of products in each way with the buffers that are counted for it."""
    columns, rows, dtype = form
    plain = torch.randn(EXPERTS, rows, columns, device="vgpu:0", dtype=dtype)
    stack = quantize_stack(plain, scheme, trains=trains)
    tensors, kind = list(stack.tensors.values()), stack.weight_class.__name__
    small = 16 * 64  # numbers of a token's pairs, of a tile's, and of each expert
    for tokens in TOKENS:
        index = routing(tokens).to("vgpu:0")
        for count in (tokens, tokens * TOP_K):
            inputs = torch.randn(count, columns, device="vgpu:0", dtype=dtype)
            peak = peak_of(partial(direct, inputs, stack, index))
            counted = max(map(sum, experts._buffers(inputs, index, tensors, kind, rows)))
            assert peak - 2 * tokens * TOP_K * rows <= counted + small, (form, tokens, count)
            # One dequantized expert, or the packed weights of a token's experts; and states.
            assert counted < 2 * rows * columns + 64 * 2 * 4 * (rows + columns) + 2**16
        if trains:
            gradient = torch.randn(tokens * TOP_K, rows, device="vgpu:0", dtype=dtype)
            arguments: Any = gradient, index, tensors, kind, columns
            peak = peak_of(partial(experts._experts_backward, *arguments))
            counted = max(map(sum, experts._backward_buffers(*arguments)))
            assert peak - 2 * tokens * TOP_K * columns <= counted + small, (form, tokens)


class Peak:
    """The most bytes that exist at once; a `Listener`."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.peak_bytes = 0

    def allocated(self, gpu: Any, storage_id: int, num_bytes: int) -> None:
        self.sizes[storage_id] = num_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))

    def freed(self, gpu: Any, storage_id: int) -> None:
        self.sizes.pop(storage_id, None)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        pass


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes that a call's tensors take, as they are asked for."""
    peak = Peak()
    with virtual.observe(peak):
        run()
    return peak.peak_bytes


@pytest.mark.parametrize("device", ["cpu", "vgpu:0"])
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_gradients_are_those_of_dequantized_experts(scheme: Scheme, device: str) -> None:
    with virtual.gpus([None], data="cpu"):
        stack = quantize_stack(stack_of(128, torch.float32).to(device), scheme, trains=True)
        weights = dequantize(stack)
        for tokens in TOKENS:
            index = routing(tokens)
            for count in (tokens, tokens * TOP_K):
                inputs = torch.randn(count, 128, requires_grad=True)
                expected_of(inputs, weights, index).square().sum().backward()
                right, inputs.grad = inputs.grad, None
                assert right is not None
                leaf = inputs.detach().to(device).requires_grad_()
                experts.linear(leaf, stack, index.to(device)).square().sum().backward()
                assert leaf.grad is not None
                # Scales are in bfloat16, as weights are.
                assert distance(leaf.grad, right) < 1e-3


def test_autocast_computes_in_its_dtype() -> None:
    with virtual.gpus([None], data="cpu"):
        for device in ("cpu", "vgpu:0"):
            stack = quantize_stack(stack_of(64, torch.float32).to(device), "nf4", trains=True)
            inputs = torch.randn(3, 64, device=device, requires_grad=True)
            with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
                result = experts.linear(inputs, stack, routing(3).to(device))
            assert result.dtype == torch.bfloat16
            result.sum().backward()
            assert inputs.grad is not None
            assert inputs.grad.dtype == torch.float32


def hold_classes(name: str) -> None:
    """Compare a model's experts in each scheme, on the CPU and on a virtual GPU."""
    classes = expert_classes(MODULES[name])
    assert classes
    with virtual.gpus([None], data="cpu"):
        for experts_class in classes:
            original = build_experts(experts_class, torch.float32)
            for scheme in SCHEMES:
                for device in ("cpu", "vgpu:0"):
                    module = copy.deepcopy(original).to(device)
                    quantize_experts(module, scheme)
                    hold_experts(module, scheme, device)


def test_experts_of_glm_compute_what_transformers_does() -> None:
    for name in MODULES:
        if name.startswith("glm"):
            hold_classes(name)


@pytest.mark.parametrize("name", ["gpt_oss", "muse_spark", "nemotron_h", "aria", "deepseek_v4"])
def test_unusual_experts_compute_what_transformers_does(name: str) -> None:
    """Transposed, with biases, with a norm, without a gate, with limits."""
    hold_classes(name)


@pytest.mark.parametrize("name", in_turn([name for name in MODULES if "glm" not in name]))
@pytest.mark.slow
def test_every_class_of_experts_computes_what_transformers_does(name: str) -> None:
    hold_classes(name)


def hold_experts(module: Any, scheme: str, device: str) -> None:
    """Compare a forward pass with transformers' own over dequantized weights."""
    plain = with_dequantized_experts(module).to("cpu")
    is_rounded = device != "cpu" and scheme != "nf4"
    for tokens in (1, 3, 20):
        index = routing(tokens)
        weights = torch.rand(tokens, TOP_K)
        hidden = torch.randn(tokens, 64)
        with torch.no_grad():
            right = plain(hidden, index, weights)
            result = module(hidden.to(device), index.to(device), weights.to(device))
        assert result.dtype == right.dtype
        assert distance(result, right) < (3e-2 if is_rounded else 1e-3), (scheme, device, tokens)


def test_experts_with_one_projection_that_no_kernel_takes_stay() -> None:
    """A forward pass has quantized projections, or plain ones."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    quantize_model(model, "nf4")
    assert not any(isinstance(parameter, ExpertStack) for parameter in model.parameters())
    assert model(input_ids=torch.arange(5)[None]).logits.isfinite().all()
