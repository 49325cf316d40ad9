"""Models with marked lines: how a case of `checker/corpus` is read, and what its markers say.

A file there holds the cases of one theme, each below a line ``# case: NAME``; what stands above the
first of them belongs to all. Written out, every case is a Python file of its own (a `helper_…` is
one that others import) with a comment on each line that a check has to speak of, and with a call of
`case`, or its arguments one by one: `build()`, `PLACEMENT`, `inputs()` or the `SHAPES` of random
inputs, `TRAIN` if it is to be trained.

- ``# fault: KIND`` CUDA raises an error at an expression that begins on this line;
- ``# warning: KIND`` it works there, but costs memory or works by luck;
- ``# followup`` it fails only because of how the check went on after a fault, so that it must not
  be counted as a fault of its own;
- ``# origin`` a device is hard-coded here, and another line fails because of it: a check may speak
  of this line, and need not.

The markers were set by hand, from what CUDA does; `errors` holds them against virtual GPUs, without
the checker.
"""

from __future__ import annotations

import atexit
import functools
import io
import re
import shutil
import sys
import tempfile
import tokenize
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from duoka import Placement, virtual
from duoka.report.check_report import Fault
from duoka.runtime.dispatch.place_tensors import place

CORPUS = Path(__file__).parent / "checker" / "corpus"
_CASE = re.compile(r"^# case: (\w+)\n", re.MULTILINE)
_IMPORT = re.compile(r"(import|from) (?!seeded)")
_MARKER = re.compile(r"#\s*(fault|warning|followup|origin)\b(?::\s*([a-z-]+))?")

Line = tuple[str, int]
"""A file's name and a line in it."""


@dataclass(frozen=True)
class Case:
    """One file of seeded faults, or a clean one, and the helper files that it names."""

    path: Path
    module: ModuleType

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def placement(self) -> Mapping[str, Any]:
        return self.module.PLACEMENT

    @property
    def train(self) -> bool:
        return getattr(self.module, "TRAIN", False)

    @property
    def unjudged(self) -> str:
        """Why `errors` can't say where the model fails; "" where it can."""
        return getattr(self.module, "UNJUDGED", "")

    @property
    def files(self) -> tuple[Path, ...]:
        helpers = getattr(self.module, "HELPERS", ())
        return (self.path, *(self.path.with_name(helper) for helper in helpers))

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.module.build()

    def inputs(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            if hasattr(self.module, "inputs"):
                return self.module.inputs()
            shapes = self.module.SHAPES
            if isinstance(shapes, Mapping):
                return {name: torch.randn(*shape) for name, shape in shapes.items()}
            return tuple(torch.randn(*shape) for shape in shapes)

    def marked(self, label: str) -> dict[Line, str]:
        """The lines with this marker, and the kinds that they name."""
        return {line: kind for line, (own, kind) in self._markers().items() if own == label}

    def _markers(self) -> dict[Line, tuple[str, str]]:
        found = {}
        for path in self.files:
            for number, text in _comments(path):
                match = _MARKER.search(text)
                if match:
                    found[path.name, number] = (match[1], match[2] or "")
        return found


def paths(folder: Path = CORPUS, prefix: str = "") -> list[Path]:
    """The cases of a folder: their names begin with `fault`, `warning` or `clean`."""
    files = sorted(_written_out(folder).glob(f"{prefix}*.py"))
    return [path for path in files if path.stem.split("_")[0] in ("fault", "warning", "clean")]


def path(name: str) -> Path:
    """The file of one case of the corpus."""
    return _written_out(CORPUS) / f"{name}.py"


@functools.cache
def _written_out(folder: Path) -> Path:
    """Every case of a folder as a file of its own, until the interpreter ends."""
    target = Path(tempfile.mkdtemp(prefix="duoka-cases-")).resolve()
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    for theme in folder.glob("*.py"):
        head, *cases = _CASE.split(theme.read_text(encoding="utf-8"))
        imports = "".join(line for line in head.splitlines(True) if _IMPORT.match(line))
        if not cases:  # a file of one case
            shutil.copy(theme, target)
        for name, text in zip(cases[::2], cases[1::2], strict=True):
            case = target / f"{name}.py"
            assert not case.exists(), f"two cases are called {name}"
            case.write_text(imports + text, encoding="utf-8")
    return target


def case(
    module: ModuleType,
    build: Callable[[], nn.Module],
    placement: Mapping[str, Any],
    given: Any,
    *,
    train: bool = False,
) -> None:
    """Describe a case; in its own file `module` is bound. `given` makes the inputs, or shapes."""
    inputs = {"inputs" if callable(given) else "SHAPES": given}
    vars(module).update(build=build, PLACEMENT=placement, TRAIN=train, **inputs)


def load(path: Path) -> Case:
    """Run a case's file anew, and its helpers with it: nothing is left of an earlier run."""
    path = path.resolve()
    name = f"seeded_{path.stem}"
    for helper in path.parent.glob("helper_*.py"):
        sys.modules.pop(helper.stem, None)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    vars(module)["case"] = functools.partial(case, module)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return Case(path=path, module=module)


def call(model: nn.Module, inputs: Any, *, train: bool) -> Any:
    """Run a model on a mapping or a tuple of arguments; with `train` the backward pass too."""
    out = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    if train:
        # Not `loss.backward()`: a mode that sees that call doesn't see what is called inside it.
        loss = loss_of(out)
        torch.autograd.graph._engine_run_backward(
            (loss,),
            (torch.ones_like(loss),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    return out


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    return out["loss"] if isinstance(out, Mapping) else out.loss


def run_on_one_device(case: Case) -> None:
    """Run the model on the CPU, where nothing can be mixed."""
    call_on_cpu(case, case.build())


def call_on_cpu(case: Case, model: nn.Module) -> None:
    """Run a model of the case, with every device of its code read as the CPU."""
    with _devices(lambda _: torch.device("cpu")):
        call(model, case.inputs(), train=case.train)


def errors(case: Case) -> list[Line | str]:
    """Where the model fails on virtual GPUs, in order: lines of the case.

    This goes on after an error as the checker's rules say, with far simpler means: it is what the
    markers are held against, without the checker.
    """
    model = case.build()
    entries = tuple((name, virtual_name(device)) for name, device in case.placement.items())
    first = _first_device(case, dict(entries))
    judge = _Judge({str(path): path.name for path in case.files})
    with virtual.gpus([None] * 8), torch.compiler.set_stance("force_eager"), _first_card():
        place(model, Placement(entries=entries))
        _watch(model, dict(entries), judge.enter)
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(first), case.inputs())
        with judge:
            call(model, inputs, train=case.train)
    return judge.lines


def line_of(fault: Fault) -> Line:
    return Path(fault.file).name, fault.line


def lines_of(faults: Iterable[Fault]) -> list[Line]:
    return [line_of(fault) for fault in faults]


def virtual_name(device: str | int) -> str:
    if device == "cpu":
        return "cpu"
    return f"vgpu:{device if isinstance(device, int) else torch.device(device).index or 0}"


def _watch(model: nn.Module, devices: Mapping[str, str], enter: Callable[[str, Any], Any]) -> None:
    """Say on which device a placed module begins, and with what."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, device in devices.items():
        for module in _called(modules[name]) if name in modules else ():
            module.register_forward_pre_hook(
                lambda _, *given, device=device: enter(device, given),
                with_kwargs=True,
                prepend=True,
            )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself, or what it holds if it is only a container and never called."""
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _first_device(case: Case, devices: Mapping[str, str]) -> str:
    model, entered = case.build(), []
    _watch(model, devices, lambda device, _: entered.append(device))
    with _devices(lambda _: torch.device("cpu")):
        call(model, case.inputs(), train=case.train)
    return entered[0]


class _Rename(TorchFunctionMode):
    """Bring what model code says of CUDA devices to others."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0].to(self._other(torch.device("cuda", (args[1:] or (0,))[0])))
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        if func is torch.Tensor.to and isinstance(args[1:2] and args[1], int):
            args = (args[0], torch.device("cuda", args[1]), *args[2:])
        args = tuple(self._renamed(value) for value in args)
        return func(*args, **{name: self._renamed(value) for name, value in kwargs.items()})

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
            value = torch.device(value)
        is_cuda = isinstance(value, torch.device) and value.type == "cuda"
        return self._other(value) if is_cuda else value


class _Judge(_Rename):
    """Notes the lines where tensors of several devices meet, and goes on with the tensors moved."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__(lambda device: f"vgpu:{device.index or 0}")
        self._files = files
        self._entered = ""
        self.lines: list[Line | str] = []

    def enter(self, device: str, given: Any) -> Any:
        """Bring the arguments of a placed module to its device; CPU scalars mix with all."""
        self._entered = device
        return tree_map_only(
            torch.Tensor,
            lambda each: each if each.device.type == "cpu" and not each.dim() else each.to(device),
            given,
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            stack = traceback.extract_stack()
            lines = [
                (self._files[f.filename], f.lineno) for f in stack if f.filename in self._files
            ]
            line = lines[-1] if lines else str(error)
            if line not in self.lines:
                self.lines.append(line)
            target = self._target(func, args, kwargs or {})
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(target), (args, kwargs)
            )
            return super().__torch_function__(func, types, args, kwargs)

    def _target(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = func.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if "out" in kwargs:
            return kwargs["out"].device
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name.startswith("__i") or name in _WRITES:
            return args[0].device
        if all(str(each.device) != self._entered for each in tensors):
            return max(tensors, key=lambda each: (each.numel(), each.device.type != "cpu")).device
        return self._entered


_WRITES = {
    "__setitem__",
    "masked_fill",
    "masked_scatter",
    "index_put",
    "index_add",
    "scatter",
    "index_copy",
}


@contextmanager
def _devices(other: Any) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"), _first_card(), _Rename(other):
        yield


@contextmanager
def _first_card() -> Iterator[None]:
    """Answer model code that asks for the current device where there is none."""
    asked = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = asked


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
