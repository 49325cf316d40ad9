"""The names that such code has, and that nobody else has them."""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from torch import nn

from duoka import virtual
from duoka.models.transformers4 import LegacyModel, execute


def run(text: str) -> types.SimpleNamespace:
    names: dict[str, object] = {"__name__": "such_code"}
    execute(lambda: exec(text, names), names)
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
    assert names.utils.__file__ == transformers.generation.utils.__file__
    assert transformers.PreTrainedModel is not LegacyModel


def test_dotted_names_and_stars_give_the_same() -> None:
    names = run(
        "import transformers, torch.nn.utils, transformers.modeling_utils as modeling\n"
        "from transformers import *\n"
        "from torch import nn\n"
        "def same():\n"
        "    return PreTrainedModel, transformers.PreTrainedModel, modeling.PreTrainedModel\n"
        "skip_init, level = torch.nn.utils.skip_init, transformers.utils.logging.WARNING\n"
        "import torch.nn.functional as F"
    )
    assert set(names.same()) == {LegacyModel}
    assert names.skip_init is not torch.nn.utils.skip_init
    assert names.level == transformers.utils.logging.WARNING
    assert names.F is torch.nn.functional
    assert names.torch.nn is names.torch.nn, "torch.compile guards what it has seen"
    assert not hasattr(names, "AutoModel")


def test_what_has_gone_may_be_named() -> None:
    names = run(
        "from transformers.modeling_utils import find_pruneable_heads_and_indices\n"
        "from transformers.modeling_utils import prune_linear_layer\n"
        "from transformers.deepspeed import is_deepspeed_zero3_enabled\n"
        "from transformers.utils.model_parallel_utils import get_device_map\n"
        "from transformers.onnx import OnnxConfig\n"
        "from transformers.onnx.utils import get_preprocessor\n"
        "import transformers.deepspeed as deepspeed\n"
        "from transformers.generation.utils import SampleOutput\n"
        "class Exported(OnnxConfig):\n    pass\n"
        "def sample() -> SampleOutput: ...\n"
    )
    assert names.prune_linear_layer is transformers.pytorch_utils.prune_linear_layer
    assert names.is_deepspeed_zero3_enabled() is False
    assert names.deepspeed.is_deepspeed_zero3_enabled is names.is_deepspeed_zero3_enabled
    functions = names.find_pruneable_heads_and_indices, names.get_device_map
    for used in (*functions, names.get_preprocessor, names.Exported):
        with pytest.raises(
            NotImplementedError, match=r"transformers\.\S+ of transformers 4 doesn't exist"
        ):
            used()


def test_what_it_does_without_has_not_gone() -> None:
    names = run(
        "try:\n    from transformers.cache_utils import SinkCache\n"
        "except ImportError:\n    SinkCache = None\n"
        "from transformers.utils import is_torch_fx_available, LossKwargs\n"
        "class Arguments(LossKwargs, total=False):\n    pass"
    )
    assert names.SinkCache is None
    assert names.is_torch_fx_available() is False


def test_other_packages_and_attributes_are_missing_still() -> None:
    with pytest.raises(ImportError, match="nonsense"):
        run("import nonsense")
    with pytest.raises(AttributeError, match="Nonsense"):
        run("import transformers\ntransformers.Nonsense")


def test_nothing_is_compiled_there_and_all_elsewhere() -> None:
    names = run(
        "import torch\n@torch.jit.script\ndef twice(x):\n    return x + x\n"
        "def later(f):\n    return torch.jit.script(f)"
    )
    assert isinstance(names.twice, types.FunctionType)
    assert names.later(names.twice) is names.twice
    assert torch.jit.script is not names.torch.jit.script


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
