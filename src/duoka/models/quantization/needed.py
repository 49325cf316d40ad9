"""What quantizing needs of other packages: that it is there, before anything is quantized.

Some of it no package promises to keep: prototypes, operators, functions of inner modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Literal

from duoka.errors import UsageError

Scheme = Literal["int8", "int4", "nf4"]

_PACKAGES: Mapping[Scheme, tuple[str, str]] = {
    "int8": ("torchao", "quantize"),
    "int4": ("torchao", "quantize"),
    "nf4": ("bitsandbytes", "bnb"),
}
_NAMES: Mapping[Scheme, tuple[str, ...]] = {
    "int8": ("torchao.quantization:Int8Tensor", "torchao.quantization:PerRow"),
    "int4": (
        "torchao.quantization:Int4TilePackedTo4dTensor",
        "torchao.quantization.utils:groupwise_affine_quantize_tensor",
        "torchao.prototype.quantization.int4:Int4OpaqueTensor",
        "torch:ops.aten._convert_weight_to_int4pack",
    ),
    "nf4": (
        "torch:ops.bitsandbytes.quantize_4bit",
        "torch:ops.bitsandbytes.dequantize_4bit",
        "torch:ops.bitsandbytes.gemm_4bit",
    ),
}
_TESTED = {"torch": "2.11 and 2.13", "torchao": "0.18", "bitsandbytes": "0.50"}


def require(scheme: Scheme) -> None:
    """Refuse to quantize where the package for it is missing or isn't the tested one."""
    package, extra = _PACKAGES[scheme]
    if find_spec(package) is None:
        raise UsageError(
            f"{scheme} weights need {package}, which isn't installed",
            hint=f'pip install "duoka[{extra}]"',
        )
    import_module(package)  # bitsandbytes gives torch its operators then
    for name in _NAMES[scheme]:
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            told = ", ".join(f"{each} {version(each)}" for each in ("torch", package))
            raise UsageError(
                f"{scheme} weights need {name.replace(':', '.')}, which isn't in {told}",
                hint=f"tested are torch {_TESTED['torch']} with {package} {_TESTED[package]}",
            ) from error
