"""``torch.autocast("vgpu")``: operators run in the lower precision, or in fp32.

The lists are those of the documentation of automatic mixed precision for CUDA. Casts aren't kept
between calls (torch's own cache can't be reached from Python), so a weight is cast at every use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .naming import PLACE, is_virtual

_KEY = "AutocastPrivateUse1"
# Run in the lower precision; in fp32; and in the widest dtype among the arguments.
_LOWER = (
    "_convolution", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul",
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
    "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "convolution", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell",
    "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
)  # fmt: skip
_FULL = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log1p", "log2", "log_softmax.int", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "nll_loss2d",
    "norm.Scalar", "norm.ScalarOpt_dim", "pdist", "poisson_nll_loss", "pow.Scalar",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod", "prod.dim_int", "reciprocal", "renorm",
    "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax.int", "softplus", "sum",
    "sum.dim_IntList", "tan", "triplet_margin_loss",
)  # fmt: skip
_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
)  # fmt: skip
_libraries: list[torch.library.Library] = []


def _find_operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_castable(value: Any) -> bool:
    """Return True for a floating-point tensor on a virtual GPU, other than float64."""
    return (
        isinstance(value, torch.Tensor)
        and is_virtual(value.device)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_castable(value) else value, values)


def _widest_dtype(args: tuple[Any, ...]) -> torch.dtype:
    """Return fp32 if an argument has it, else the lower precision of autocast."""
    dtypes = {value.dtype for value in tree_leaves(args) if _is_castable(value)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(PLACE)


def _make_casting(name: str, policy: str) -> Any:
    """Wrap an operator to cast its arguments by a policy: "lower", "full" (fp32) or "widest"."""
    # Autocast comes before autograd, so that the casts are part of the graph and gradients have the
    # dtype of the uncast arguments. Inside, autocast's key is excluded: neither the operator nor
    # its parts are cast again.
    operator = _find_operator(name)
    names = [argument.name for argument in operator._schema.arguments]
    dtype_place = names.index("dtype") if policy == "full" and "dtype" in names else None
    excluded = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        if policy == "lower":
            dtype = torch.get_autocast_dtype(PLACE)
        else:
            dtype = torch.float32 if policy == "full" else _widest_dtype(args)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if dtype_place is None or not _is_castable(args[0]):
                # Last argument first, as in PyTorch's CUDA build: GCC evaluates from right to left.
                named = _cast(kwargs, dtype)
                casts = [_cast(value, dtype) for value in reversed(args)]
                return operator(*reversed(casts), **named)
            # The operator converts to fp32 itself, unless the caller gives another `dtype`.
            named = dict(zip(names[1:], args[1:], strict=False)) | kwargs
            return operator(args[0], **named | {"dtype": named.get("dtype") or dtype})

    return run


def install() -> None:
    """Register the policies with torch, for the life of the process."""
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for names, policy in ((_LOWER, "lower"), (_FULL, "full"), (_WIDEST, "widest")):
        for name in names:
            aten.impl(name, _make_casting(name, policy), _KEY)
    _libraries.extend((fallthrough, aten))
