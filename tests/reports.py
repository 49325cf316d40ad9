"""Reports made by hand, about a model file that is written for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from duoka.errors import Faults
from duoka.report.check_report import (
    CallSite,
    CheckReport,
    DeviceTransfer,
    Fault,
    Operand,
    Origin,
    PeakMemory,
    Place,
    Stop,
    Sync,
)

GIB = 2**30
MESSAGE = (
    "Expected all tensors to be on the same device, but found at least two devices, "
    "cuda:0 and cuda:1!"
)
_LOSS = (
    "torch.nn.functional.cross_entropy(logits.view(-1, self.config.vocabulary), labels.view(-1))"
)
SOURCE = '''\
"""模型"""
import torch


class Encoder(torch.nn.Module):
    def forward(self, h):
        caches = []
        for layer in self.layers:
            h, cache = layer(h)
            caches.append(cache)
        presents = torch.cat(caches, dim=0)
        return h + self.table, presents


class Model(torch.nn.Module):
\tdef forward(self, ids, labels):
\t\tlogits = self.encoder(ids)[0]
\t\tloss = {"损失": %s}
\t\treturn torch.where(
\t\t\tlogits > 0,
\t\t\tlogits,
\t\t\tlabels,
\t\t) + loss
'''.replace("%s", _LOSS)


def place_of(file: Path, text: str, function: str = "") -> Place:
    """The first place of a text within one line of a file."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if text in line:
            column = line.index(text)
            return Place(
                file=str(file),
                line=number,
                column=column,
                end_line=number,
                end_column=column + len(text),
                text=text,
                function=function,
            )
    raise AssertionError(f"{text!r} isn't in {file}")


def write_model(folder: Path) -> Path:
    file = folder / "modeling_tiny.py"
    file.write_text(SOURCE, encoding="utf-8")
    return file


def cache_fault(file: Path) -> Fault:
    """Caches of 28 layers on two devices, made into one; the loss follows from it."""
    caches = place_of(file, "torch.cat(caches, dim=0)", "Encoder.forward")
    given = replace(caches, column=caches.column + 10, end_column=caches.column + 16, text="caches")
    made = place_of(file, "layer(h)", "Encoder.forward")
    operands = tuple(
        Operand(
            argument=f"tensors[{index}]",
            expression="caches",
            place=given,
            device=f"cuda:{index // 14}",
            shape=(2, 1, 8192, 2, 128),
            dtype="float16",
            num_bytes=8 * 2**20,
            moved=index < 14,
            origin=Origin(kind="operation", place=made),
        )
        for index in range(28)
    )
    top = CallSite(place=place_of(file, "self.encoder(ids)", "Model.forward"))
    return Fault(
        kind="mixed-devices",
        effect="raises",
        op="torch.cat",
        operands=operands,
        target="cuda:1",
        place=caches,
        message=MESSAGE,
        path=(top, CallSite(place=caches, module="encoder")),
        phase="prefill",
        modules=("encoder",),
        followups=(loss_fault(file),),
    )


def loss_fault(file: Path) -> Fault:
    """Logits and labels on two devices."""
    place = place_of(file, _LOSS, "Model.forward")
    logits = Operand(
        argument="input",
        expression="logits.view(-1, self.config.vocabulary)",
        place=place_of(file, "logits.view(-1, self.config.vocabulary)"),
        device="cuda:1",
        shape=(4096, 65024),
        dtype="float16",
        num_bytes=2 * 4096 * 65024,
    )
    labels = Operand(
        argument="target",
        expression="labels.view(-1)",
        place=place_of(file, "labels.view(-1)"),
        device="cuda:0",
        shape=(4096,),
        dtype="int64",
        num_bytes=8 * 4096,
        moved=True,
        origin=Origin(kind="input", name="labels"),
    )
    return Fault(
        kind="mixed-devices",
        effect="raises",
        op="torch.nn.functional.cross_entropy",
        operands=(logits, labels),
        target="cuda:1",
        place=place,
        message=MESSAGE,
        path=(CallSite(place=place),),
        phase="loss",
        modules=("",),
    )


def table_fault(file: Path) -> Fault:
    """A table that is a plain attribute, met in forty layers."""
    place = place_of(file, "h + self.table", "Encoder.forward")
    hidden = Operand(
        argument="self",
        expression="h",
        place=replace(place, end_column=place.column + 1, text="h"),
        device="cuda:1",
        shape=(4, 8),
        dtype="float32",
        num_bytes=128,
        origin=Origin(kind="operation", place=place_of(file, "layer(h)")),
    )
    table = Operand(
        argument="other",
        expression="self.table",
        place=replace(place, column=place.column + 4, text="self.table"),
        device="cpu",
        shape=(4, 8),
        dtype="float32",
        num_bytes=128,
        moved=True,
        origin=Origin(kind="attribute", name="encoder.table"),
    )
    return Fault(
        kind="mixed-devices",
        effect="raises",
        op="Tensor.__add__",
        operands=(hidden, table),
        target="cuda:1",
        place=place,
        message=MESSAGE.replace("cuda:0", "cpu"),
        path=tuple(CallSite(place=place, module=f"encoder.blocks.{index}") for index in range(12)),
        phase="prefill",
        modules=tuple(f"encoder.blocks.{index}.attention" for index in range(40)),
        count=80,
    )


def bad_report(folder: Path) -> CheckReport:
    """A report in which something of every kind is wrong."""
    file = write_model(folder)
    spread = Place(
        file=str(file), line=19, column=9, end_line=23, end_column=10, function="Model.forward"
    )
    warning = replace(
        table_fault(file), kind="hard-coded-device", effect="nothing", message="", place=spread
    )
    return CheckReport(
        model="TinyForCausalLM",
        devices=("cuda:0", "cuda:1"),
        completeness=Faults(
            missing=tuple(f"encoder.layers.{index}.weight" for index in range(28)),
            unknown=("transformer.word_embeddings",),
            nearest={"transformer.word_embeddings": ("transformer.embedding.word_embeddings",)},
            completed={"": 0},
        ),
        faults=(cache_fault(file), table_fault(file)),
        warnings=(warning,),
        memory=(peak(file, "cuda:0", 24), peak(file, "cuda:1", 12)),
        transfers=(
            DeviceTransfer(
                phase="decode", source="cuda:0", target="cuda:1", hops=2, num_bytes=8192, steps=3
            ),
        ),
        syncs=(Sync(op="Tensor.item", place=warning.place, phase="decode", count=3),),
        notes=("encoder.fast is compiled; it ran eagerly",),
        stop=Stop(
            message="TypeError: 'NoneType' object is not subscriptable",
            place=place_of(file, "self.encoder(ids)[0]", "Model.forward"),
            phase="decode",
            hint="look at it",
        ),
        seconds=2.5,
    )


def good_report(folder: Path) -> CheckReport:
    """A report in which all is well."""
    return CheckReport(
        model="TinyForCausalLM",
        devices=("cuda:0", "cuda:1"),
        memory=(peak(write_model(folder), "cuda:0", 24),),
        transfers=(
            DeviceTransfer(
                phase="decode", source="cuda:0", target="cuda:1", hops=1, num_bytes=4096
            ),
        ),
        seconds=0.5,
    )


def peak(file: Path, device: str, budget_gib: int) -> PeakMemory:
    """13 GiB reserved."""
    return PeakMemory(
        device=device,
        budget_bytes=budget_gib * GIB,
        allocated_bytes=12 * GIB,
        reserved_bytes=13 * GIB,
        kinds={"weights": 10 * GIB, "cache": GIB, "activations": GIB, "gradients": 0},
        phase="prefill",
        place=place_of(file, "torch.cat(caches, dim=0)"),
        module="encoder",
        overflows=budget_gib < 13,
    )
