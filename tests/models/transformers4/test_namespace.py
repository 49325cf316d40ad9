"""The names that such code has, and that nobody else has them."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from torch import nn

from duoka import virtual
from duoka.models.transformers4 import LegacyModel, importing, namespace


def run(text: str) -> types.SimpleNamespace:
    names = namespace()
    with importing():
        exec(text, names)
    return types.SimpleNamespace(**names)


def test_imports_give_what_was_there() -> None:
    names = run(
        "from transformers import PreTrainedModel, AutoConfig\n"
        "from transformers.utils.import_utils import is_torch_fx_available\n"
        "from transformers.generation.logits_process import LogitsWarper\n"
        "import transformers.generation.utils as utils"
    )
    assert names.PreTrainedModel is LegacyModel
    assert names.AutoConfig is transformers.AutoConfig
    assert names.is_torch_fx_available() is False
    assert names.LogitsWarper is transformers.LogitsProcessor
    assert names.utils is transformers.generation.utils
    assert transformers.PreTrainedModel is not LegacyModel


def test_what_never_was_is_missing_still() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        run("from transformers import PreTrainedModel, Nonsense")


def test_nothing_is_compiled_while_it_is_imported() -> None:
    script = torch.jit.script
    names = run("import torch\n@torch.jit.script\ndef twice(x):\n    return x + x")
    assert isinstance(names.twice, types.FunctionType)
    assert torch.jit.script is script


def test_skipped_initialisation_leaves_no_undefined_buffer() -> None:
    class Counting(nn.Module):
        def __init__(self, device: object = None) -> None:
            super().__init__()
            self.register_buffer("numbers", torch.arange(3))

    made = run("from torch.nn.utils import skip_init").skip_init(Counting, device="cpu")
    assert made.numbers.tolist() == [0, 1, 2]


def test_a_virtual_tensor_has_the_type_of_cudas() -> None:
    names = run(
        "kind_of = lambda x: type(x)\nis_class = isinstance(int, type)\nlist_kind = type([])"
    )
    assert (names.is_class, names.list_kind) == (True, list)
    with virtual.unnamed_gpus([None]):
        tensor = torch.zeros(2, device=virtual.virtual_device(0))
        assert names.kind_of(tensor) is torch.Tensor
        assert type(tensor) is not torch.Tensor
    assert names.kind_of(nn.Parameter(torch.zeros(1))) is nn.Parameter


def test_its_type_is_what_the_builtin_is_otherwise() -> None:
    names = run(
        "alias = type[int]\n"
        "class Meta(type):\n"
        "    def __init__(cls, *args):\n"
        "        cls.seen = True\n"
        "class Made(metaclass=Meta):\n    pass\n"
        "kind_of = lambda x: type(x)"
    )
    assert names.alias == type[int]
    assert names.Made.seen
    assert names.kind_of(names.Made) is names.Meta
    with virtual.unnamed_gpus([None]):
        parameter = nn.Parameter(torch.zeros(2, device=virtual.virtual_device(0)))
        assert names.kind_of(parameter) is nn.Parameter


def test_its_type_makes_classes() -> None:
    names = run("Made = type('Made', (), {'x': 1})\nclass Meta(type):\n    pass")
    assert names.Made.x == 1
    assert isinstance(names.Meta("M", (), {}), type)
