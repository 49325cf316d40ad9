"""A checkpoint's own code: its faults in its own files, and where it stops if it can't run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from duoka import Checkpoint, Workload
from duoka.api.check import check
from duoka.errors import ModelError
from duoka.report.check_report import CheckReport

SOURCES = Path(__file__).parent / "remote"
CONFIG = {
    "model_type": "pebble",
    "vocab_size": 64,
    "auto_map": {
        "AutoConfig": "configuration_pebble.PebbleConfig",
        "AutoModelForCausalLM": "modeling_pebble.PebbleForCausalLM",
    },
}
MAP = {
    "transformer.embedding": 0,
    "transformer.layers.0": 0,
    "transformer.layers.1": 0,
    "transformer.layers.2": 1,
    "transformer.layers.3": 1,
    "transformer.final_norm": 1,
    "output_layer": 1,
}
WORK = Workload(prompt_tokens=16, new_tokens=3)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "pebble-7b"
    shutil.copytree(SOURCES, made)
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def edited(directory: Path, name: str, old: str, new: str) -> int:
    """Put a change into a file; its line."""
    text = (directory / name).read_text()
    assert text.count(old) == 1
    (directory / name).write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def checked(directory: Path, *, train: bool = False, device_map: object = MAP) -> CheckReport:
    checkpoint = Checkpoint.open(directory, trust_remote_code=True)
    return check(checkpoint, device_map, workload=WORK, train=train)


@pytest.mark.parametrize("train", [False, True])
def test_clean_code_is_clean(directory: Path, *, train: bool) -> None:
    report = checked(directory, train=train)
    assert report.stop is None
    assert report.ok
    assert report.model == str(directory)
    assert list(directory.rglob("*.pyc")) == []


def test_a_plan_for_own_code_is_clean(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory, trust_remote_code=True)
    assert check(checkpoint, workload=WORK, fleet="virtual:2x1GiB").ok


def test_a_fault_is_told_in_the_file_that_holds_it(directory: Path) -> None:
    line = edited(directory, "helpers_pebble.py", ", device=hidden.device)\n    col", ")\n    col")
    report = checked(directory)
    (fault,) = report.faults
    assert Path(fault.file) == directory / "helpers_pebble.py"
    assert fault.function == "causal_bias"
    assert fault.line == line + 2
    assert set(fault.devices) == {"cuda:0", "cpu"}
    assert [Path(call.place.file).name for call in fault.path][-3:] == [
        "modeling_pebble.py",
        "modeling_pebble.py",
        "helpers_pebble.py",
    ]


def test_training_finds_what_only_training_meets(directory: Path) -> None:
    line = edited(
        directory, "modeling_pebble.py", "labels[:, 1:].to(logits.device)", "labels[:, 1:]"
    )
    assert checked(directory).ok
    (fault,) = checked(directory, train=True).faults
    assert fault.op == "torch.nn.functional.cross_entropy"
    assert (Path(fault.file).name, fault.line) == ("modeling_pebble.py", line + 1)


def test_an_edited_file_is_read_anew(directory: Path) -> None:
    assert checked(directory).ok
    edited(
        directory,
        "helpers_pebble.py",
        "past + tokens, device=hidden.device)\n    return",
        "past + tokens)\n    return",
    )
    assert not checked(directory).ok


def test_without_trust_no_code_runs(directory: Path) -> None:
    with pytest.raises(ModelError) as caught:
        check(Checkpoint.open(directory), MAP, workload=WORK)
    assert "--trust-remote-code" in (caught.value.hint or "")


OLD = [
    pytest.param(
        "hidden = self.embedding(input_ids)\n",
        "hidden = self.embedding(input_ids)\n        masks = self.estimate_tokens({})\n",
        1,
        "AttributeError: .*estimate_tokens",
        id="a method that is missing",
    ),
    pytest.param(
        "from transformers.modeling_outputs import CausalLMOutputWithPast\n",
        "from transformers.modeling_outputs import CausalLMOutputWithPast\n"
        "from transformers.modeling_utils import find_pruneable_heads_and_indices\n"
        "find_pruneable_heads_and_indices({}, 1, 1, {})\n",
        2,
        "NotImplementedError: transformers.modeling_utils.find_pruneable_heads_and_indices of",
        id="a name that is missing",
    ),
    pytest.param(
        "self.final_norm = nn.LayerNorm(config.width)\n",
        "self.final_norm = nn.LayerNorm(config.width)\n        self.prune_heads({})\n",
        1,
        "AttributeError: .*prune_heads",
        id="a call while it is built",
    ),
]


@pytest.mark.parametrize(("old", "new", "below", "message"), OLD)
@pytest.mark.parametrize("device_map", [MAP, None], ids=["map", "plan"])
def test_code_of_an_older_transformers(
    directory: Path, old: str, new: str, below: int, message: str, device_map: object
) -> None:
    line = edited(directory, "modeling_pebble.py", old, new) + below
    checkpoint = Checkpoint.open(directory, trust_remote_code=True)
    report = check(checkpoint, device_map, workload=WORK, fleet="virtual:2x1GiB")
    assert report.stop is not None
    assert not report.ok
    assert report.faults == ()
    assert re.match(message, report.stop.message)
    assert report.stop.place is not None
    assert (Path(report.stop.place.file), report.stop.place.line) == (
        directory / "modeling_pebble.py",
        line,
    )
    assert "other library versions" in report.stop.hint


def test_a_hint_never_leads_to_other_code(directory: Path) -> None:
    """duoka has code for this model type: it isn't what was asked about."""
    line = edited(directory, "modeling_pebble.py", *OLD[0].values[:2])
    (directory / "config.json").write_text(json.dumps({**CONFIG, "model_type": "chatglm"}))
    report = checked(directory)
    assert report.stop is not None
    assert report.stop.place is not None
    assert report.stop.place.line == line + 1
    assert "trust" not in report.stop.hint


def test_a_package_that_is_missing(directory: Path) -> None:
    for line, hint in (
        (
            "import nosuchpackage",
            "the code needs nosuchpackage, which isn't installed",
        ),
        ("import sklearn.nothing", "pip install scikit-learn"),
        ("import configuration_pebble", "must use `from .configuration_pebble import …`"),
        (
            "from .missing_pebble import x",
            "missing_pebble.py is missing beside the code: download it",
        ),
    ):
        edited(directory, "helpers_pebble.py", "import torch\n", f"import torch\n{line}\n")
        report = checked(directory)
        assert report.stop is not None
        assert hint in report.stop.hint, "a name that a stranger may have taken is not proposed"
        edited(directory, "helpers_pebble.py", f"import torch\n{line}\n", "import torch\n")
