"""The engine: what is a fault, what follows from one, where it goes on, what it leaves behind."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import duoka
from duoka import Workload, models
from duoka.checker.prove import prove
from duoka.errors import ModelError, PlacementError, UsageError
from duoka.report.check_report import CheckReport
from duoka.virtual import VirtualTensor


class Two(nn.Module):
    """Two layers; `run` is what happens between and after them."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def line_of(function: Any, marker: str) -> int:
    """The line of a marker in a function's source."""
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if marker in line)


MAP = {"a": 0, "b": 1, "scale": 0, "shift": 0}


def check(run: Any, device_map: Any = None, **choices: Any) -> CheckReport:
    return duoka.check(Two(run), device_map or MAP, inputs=(torch.ones(2, 4),), **choices)


def test_a_clean_model_is_clean() -> None:
    report = check(lambda m, x: m.b(m.a(x) * m.scale + m.shift))
    assert report.ok
    assert report.faults == report.warnings == ()
    assert report.complete
    assert report.devices == ("cuda:0", "cuda:1")


def test_a_fault_says_what_where_and_between_which() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x))
        return h * m.scale  # here

    report = check(run)
    (fault,) = report.faults
    assert not report.ok
    assert fault.file == __file__
    assert fault.line == line_of(run, "# here")
    assert fault.function.endswith("run")
    assert fault.source == "h * m.scale"
    assert fault.op == "Tensor.mul"
    assert fault.devices == ("cuda:1", "cuda:0")
    assert fault.expressions == ("h", "m.scale")
    assert fault.target == "cuda:1"
    assert fault.effect == "raises"
    assert [operand.moved for operand in fault.operands] == [False, True]
    assert fault.operands[1].origin is not None
    assert fault.operands[1].origin.name == "scale"
    assert "cuda:0 and cuda:1" in fault.message or "cuda:1 and cuda:0" in fault.message
    assert [call.place.function.split(".")[-1] for call in fault.path] == ["forward", "run"]


def test_one_run_reports_all_faults() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x))
        h = h * m.scale
        h = h + m.shift
        return torch.cat([h, torch.zeros(2, 4)])

    assert [fault.source for fault in check(run).faults] == [
        "h * m.scale",
        "h + m.shift",
        "torch.cat([h, torch.zeros(2, 4)])",
    ]


def test_what_follows_from_a_fault_is_listed_under_it() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        near = m.a(x)
        mixed = near + m.b(near)  # runs on cuda:1, which was entered last
        return m.a(x) + mixed  # and now this, whose `mixed` could have been on cuda:0

    (fault,) = check(run).faults
    (followup,) = fault.followups
    assert fault.source == "near + m.b(near)"
    assert followup.source == "m.a(x) + mixed"


def test_a_fault_that_would_be_there_anyway_is_no_followup() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x)) + m.scale
        return h * m.shift

    faults = check(run).faults
    assert [len(fault.followups) for fault in faults] == [0, 0]


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.b(m.a(x)) * torch.tensor(2.0),
        lambda m, x: m.b(m.a(x))[torch.tensor([1, 0])],
        lambda m, x: m.b(m.a(x)).copy_(m.a(x)),
        lambda m, x: torch.where(m.b(m.a(x)) > 0, 1.0, torch.tensor(0.0)),
        lambda m, x: F.dropout(m.b(m.a(x)), 0.5),
    ],
)
def test_what_cuda_accepts_is_no_fault(run: Any) -> None:
    report = check(run)
    assert report.ok, report.stop or report.faults


def test_a_write_runs_where_it_writes() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        near = m.a(x)
        near += m.b(near)
        return near

    (fault,) = check(run).faults
    assert fault.kind == "in-place"
    assert fault.target == "cuda:0"
    assert fault.expressions == ("near", "m.b(near)")


def test_image_features_go_to_the_embeddings() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        words, features = m.a(x), m.b(x)
        return words.masked_scatter(words > 0, features)

    (fault,) = check(run).faults
    assert fault.target == "cuda:0"
    assert [operand.moved for operand in fault.operands][-1]


@pytest.mark.parametrize(("length", "rows"), [(2, 1), (2**17, 2**16), (2**17, 2**18)])
def test_it_goes_on_where_the_fewest_bytes_are_copied_in_all(length: int, rows: int) -> None:
    """Spliced embeddings go on to the first layer: what was moved there once needn't go back."""

    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        words, features = m.a(x[:1].expand(length, 4)), m.b(x[:1].expand(rows, 4))
        return m.a(torch.cat((words[:1], features, words[1:])))

    report = check(run)
    (fault,) = report.faults
    assert fault.target == "cuda:0"
    assert [it.expression for it in fault.operands if it.moved] == ["features"]
    (patch,) = duoka.repair(report)
    assert [cure.step_bytes for cure in patch.cures] == [16 * rows]
    assert "features.to(words.device)" in patch.diff
    assert patch.proved


def test_it_stays_where_what_comes_next_is() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        words, features = m.a(x), m.b(x[:1])
        return m.b(torch.cat((words, features)))

    (fault,) = check(run).faults
    assert fault.target == "cuda:1"
    assert [it.expression for it in fault.operands if it.moved] == ["words"]


def test_the_loss_and_backward_are_run_in_training() -> None:
    def run(m: Two, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, labels = m.b(m.a(x)), m.shift[:2].long()
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}

    report = check(run, train=True)
    (fault,) = report.faults
    assert fault.op == "torch.nn.functional.cross_entropy"
    assert fault.expressions == ("logits", "labels")
    assert "backward" in {transfer.phase for transfer in report.transfers}
    assert {"weights", "gradients"} <= report.memory[0].kinds.keys()


def test_values_that_code_reads_are_real_where_the_model_is_small() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        return m.b(h) if h.abs().sum().item() >= 0 else m.missing(h)

    report = check(run)
    assert report.ok
    assert "real numbers" in report.notes[0]
    assert [(sync.op, sync.phase) for sync in report.syncs] == [("item", "forward")]


def test_code_that_fails_by_itself_is_told_with_its_place() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x)) * m.scale
        return h.reshape(3, 5)  # here

    report = check(run)
    assert report.stop is not None
    assert report.stop.place is not None
    assert report.stop.place.line == line_of(run, "# here")
    assert len(report.faults) == 1
    assert not report.ok


def test_transfers_count_bytes_and_hops() -> None:
    report = check(lambda m, x: m.b(m.a(x)))
    (transfer,) = [each for each in report.transfers if each.source == "cuda:0"]
    assert (transfer.target, transfer.hops, transfer.num_bytes) == ("cuda:1", 1, 2 * 4 * 4)


def test_too_little_memory_is_told_with_the_line_of_the_peak() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        return m.b(m.a(x)) + torch.zeros(3 * 2**20, device=x.device).sum().to("cuda:1")  # here

    report = check(run, fleet="4MiB,4MiB")
    first, second = report.memory
    assert first.overflows
    assert not second.overflows
    assert not report.fits
    assert first.kinds["activations"] >= 12 * 2**20
    assert first.place is not None
    assert first.place.line == line_of(run, "# here")


# ── what is left behind ──


def _state(model: nn.Module) -> list[Any]:
    return [
        (name, id(tensor), type(tensor), tensor.device.type, tensor.detach().clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        m.seen = m.b(m.a(x))
        m.history.append(m.seen)
        m.shift = m.shift + 1
        if fails:
            raise ValueError
        return m.seen * m.scale

    model = Two(run)
    model.history = []
    hooks: list[Any] = []
    model.a.register_forward_hook(lambda *_: hooks.append(1))
    model.scale.grad = torch.full((4,), 3.0)
    before, names = _state(model), set(vars(model))
    report = duoka.check(model, MAP, inputs=(torch.ones(2, 4),), train=True)
    assert (report.stop is not None) is fails
    for was, now in zip(before, _state(model), strict=True):
        assert was[:4] == now[:4]
        torch.testing.assert_close(was[4], now[4])
    assert set(vars(model)) == names
    assert model.history == []
    assert model.scale.grad.tolist() == [3.0] * 4
    assert type(model.a) is nn.Linear
    assert len(model.a._forward_hooks) == 1
    assert hooks  # the model's own hooks ran


_TABLES: dict[str, torch.Tensor] = {}


def test_no_virtual_tensor_stays_in_a_global() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        if "table" not in _TABLES:
            _TABLES["table"] = torch.zeros(4, device=x.device)
        return m.b(m.a(x + _TABLES["table"]))

    assert check(run).ok
    assert _TABLES == {}


def test_a_check_leaves_no_tensors_alive() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        h = m.b(m.a(x)) * m.scale
        made.append(weakref.ref(h))
        return h

    report = check(run, train=True)
    gc.collect()
    assert not report.ok
    assert made
    assert all(each() is None or not isinstance(each(), VirtualTensor) for each in made)


# ── models of transformers ──


@pytest.mark.slow
def test_a_plan_is_checked_with_the_bytes_that_it_was_proved_with() -> None:
    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    work = Workload(batch=2, prompt_tokens=64, new_tokens=8)
    plan = duoka.plan(model, "virtual:2x9MiB", work)
    report = duoka.check(model, plan)
    assert report.ok, report.stop or report.faults
    measured = prove(plan, model)
    assert [(m.allocated_bytes, m.reserved_bytes) for m in measured] == [
        (peak.allocated_bytes, peak.reserved_bytes) for peak in report.memory
    ]
    assert {"weights", "cache", "activations"} <= report.memory[0].kinds.keys()
    assert {each.phase for each in report.transfers} == {"prefill", "decode"}


def test_an_item_that_is_changed_and_put_back_is_one_fault_where_it_is_kept() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        near = m.a(x).detach()
        near[m.b(x) > 0] *= 2
        return near

    (fault,) = check(run).faults
    assert fault.target == "cuda:0"
    assert fault.expressions == ("near", "m.b(x) > 0")


def test_memory_of_a_gpu_that_numpy_asks_for_is_a_fault() -> None:
    def run(m: Two, x: torch.Tensor) -> Any:
        return m.b(m.a(x)).detach().numpy().sum()

    (fault,) = check(run).faults
    assert fault.target == "cpu"
    assert "device type tensor to numpy" in fault.message


def test_random_numbers_go_on_as_if_nothing_was_checked() -> None:
    model = Two(lambda m, x: F.dropout(m.b(m.a(x)), 0.5))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    duoka.check(model, MAP, inputs=torch.ones(2, 4), train=True)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ModelError, match="TorchScript"):
        duoka.check(model, {"0": 0, "1": 1}, inputs=torch.ones(1, 4))


@pytest.mark.parametrize("device", ["disk", -1, None, True, "cuda:x"])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(PlacementError, match="is not a device"):
        check(lambda m, x: m.a(x), {**MAP, "b": device})


def test_training_is_checked_within_inference_mode_too() -> None:
    with torch.inference_mode():
        model = Two(lambda m, x: m.b(m.a(x)))
        report = duoka.check(model, MAP, inputs=(torch.ones(2, 4),), train=True)
    assert report.ok, report.stop


@pytest.mark.parametrize("inputs", [5, "text", iter([])])
def test_inputs_that_are_none_are_refused(inputs: Any) -> None:
    with pytest.raises(UsageError, match="inputs can't be"):
        duoka.check(Two(lambda m, x: m.a(x)), MAP, inputs=inputs)


def test_a_gpu_that_the_code_names_beyond_the_placement_is_a_fault() -> None:
    def run(m: Two, x: torch.Tensor) -> torch.Tensor:
        return m.b(m.a(x)) + torch.zeros(4, device="cuda:5")

    (fault,) = check(run).faults
    assert fault.kind == "hard-coded-device"
    assert fault.devices == ("cuda:1", "cuda:5")
