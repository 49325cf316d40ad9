"""`duoka check`: its report, its exit code, and what it writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemas
import yaml
from progress import without_progress

from duoka.errors import MachineError

from .conftest import GPUS, SIZES, Program

pytestmark = pytest.mark.usefixtures("single_sequences")

CONFIGURATION = """\
from transformers import PretrainedConfig


class FaultyConfig(PretrainedConfig):
    model_type = "faulty"

    def __init__(self, vocab_size=64, hidden_size=32, num_hidden_layers=4, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
"""
MODELING = """\
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_faulty import FaultyConfig


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden):
        return hidden + self.mix(hidden)


class FaultyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FaultyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, **kwargs):
        hidden = self.embed(input_ids)
        made = []
        for block in self.blocks:
            hidden = block(hidden)
            made.append(hidden)
        gathered = torch.cat(made, dim=1)  # everything
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=(gathered,))
"""
CONFIG = {
    "model_type": "faulty",
    "architectures": ["FaultyForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_faulty.FaultyConfig",
        "AutoModelForCausalLM": "modeling_faulty.FaultyForCausalLM",
    },
}
MAP = {"embed": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with model code of its own that fails on two devices; a map beside it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "faulty"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "configuration_faulty.py").write_text(CONFIGURATION)
    (folder / "modeling_faulty.py").write_text(MODELING)
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    return folder


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(MODELING.splitlines(), 1) if text in line)


def test_all_is_well(tiny: Path, program: Program) -> None:
    done = program("check", tiny, *GPUS, *SIZES)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    first = done.stdout.splitlines()[0]
    assert first.startswith("✓ ")
    ran = done.stdout.splitlines()[2]
    assert ran.startswith("float32 · batch 1 · context 96 (64 + 32 new)")
    assert "peak memory" in done.stdout
    assert "fault 1" not in done.stdout


def test_json_is_the_report(tiny: Path, program: Program) -> None:
    done = program("check", tiny, *GPUS, *SIZES, "--json")
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    report = json.loads(done.stdout)
    jsonschema.validate(report, schemas.report_schema())
    assert report["ok"] is True
    ran = {"prompt_tokens": 64, "new_tokens": 32, "batch": 1, "dtype": "float32", "images": 0}
    assert {name: report["workload"][name] for name in ran} == ran
    assert [peak["budget_bytes"] for peak in report["memory"]] == [64 * 2**20] * 2


def test_a_saved_plan_is_checked(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    program("plan", tiny, *GPUS, *SIZES, "--use-all", "--save", saved)
    for arguments in ((tiny, "--plan", saved), ("--plan", saved)):
        report = json.loads(program("check", *arguments, "--json").stdout)
        assert report["devices"] == ["vgpu:0", "vgpu:1"]
        assert report["ok"] is True


@pytest.mark.parametrize(
    "method", [(), pytest.param(("lora", "--lora-rank", "4"), marks=pytest.mark.slow)]
)
def test_training(method: tuple[str, ...], tiny: Path, program: Program) -> None:
    done = program("check", tiny, *GPUS, "--context", "96", "--train", *method)
    assert done.returncode == 0
    assert "runs and trains without a fault" in " ".join(done.stdout.split())


def test_an_incomplete_map_is_completed(tiny: Path, program: Program, tmp_path: Path) -> None:
    given = tmp_path / "map.json"
    given.write_text(json.dumps({"": 0, "transformer.word_embeddings": 0}))
    done = program("check", tiny, "--device-map", given, *SIZES)
    assert done.returncode == 13
    assert "the map is incomplete" in done.stdout
    assert "transformer.word_embeddings → transformer.embedding.word_embeddings" in done.stdout
    assert without_progress(done.stderr) == ""


def test_a_map_beyond_the_memory(tiny: Path, program: Program, tmp_path: Path) -> None:
    given = tmp_path / "map.json"
    given.write_text('{"": 0}')
    done = program("check", tiny, "--device-map", given, "--gpus", "2x1MiB", *SIZES)
    assert done.returncode == 13
    assert "cuda:0 exceeds its budget by" in " ".join(done.stdout.split())


def check(program: Program, folder: Path, *arguments: object) -> Any:
    return program(
        "check", folder.name, "--trust-remote-code", "--device-map", "map.json", *arguments
    )


def test_faults_in_code_of_a_checkpoint(faulty: Path, program: Program) -> None:
    done = check(program, faulty, *SIZES)
    assert done.returncode == 13
    assert "2 tensors made[0] … made[1]" in done.stdout
    assert f"faulty/modeling_faulty.py:{line_of('torch.cat')}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "modeling_faulty.py  sha256" in done.stderr


def test_sarif(faulty: Path, program: Program) -> None:
    done = check(program, faulty, "--context", "96", "--train", "--sarif", "duoka.sarif")
    assert done.stderr.endswith("saved to duoka.sarif\n")
    [run] = json.loads(Path("duoka.sarif").read_text(encoding="utf-8"))["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"faulty/modeling_faulty.py"}
    lines = [place["region"]["startLine"] for place in places]
    assert lines == [line_of("torch.cat"), line_of("cross_entropy")]


def test_fixed_copies(faulty: Path, program: Program) -> None:
    done = check(program, faulty, *SIZES, "--fix")
    assert done.returncode == 13  # what was checked is as it was
    assert "\n-        gathered = torch.cat(made, dim=1)  # everything\n" in done.stdout
    assert "proved" in done.stdout.splitlines()[-1]
    assert (faulty / "modeling_faulty.py").read_text() == MODELING
    copy = Path("duoka-fixed/faulty/modeling_faulty.py")
    assert f"saved to {copy}" in done.stderr
    shutil.copy(copy, faulty / "modeling_faulty.py")
    assert check(program, faulty, *SIZES).returncode in (0, 13)


def test_fixed_in_place(faulty: Path, program: Program) -> None:
    before = check(program, faulty, "--context", "96", "--train", "--json")
    assert len(json.loads(before.stdout)["faults"]) == 2
    done = check(program, faulty, "--context", "96", "--train", "--fix", "--in-place", "--json")
    report = json.loads(done.stdout)
    jsonschema.validate(report, schemas.report_schema())
    assert [patch["proved"] for patch in report["patches"]] == [True]
    assert report["uncured"] == []
    assert (faulty / "modeling_faulty.py").read_text() != MODELING
    after = check(program, faulty, "--context", "96", "--train", "--json")
    assert json.loads(after.stdout)["faults"] == []
    assert done.returncode == 0


def test_nothing_to_fix(
    tiny: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = program("check", tiny, *GPUS, *SIZES, "--fix")
    assert done.returncode == 0
    assert not (tmp_path / "duoka-fixed").exists()
    assert done.stdout.splitlines()[-1] == (
        "nothing to fix: the check found no fault in the model's code"
    )
    assert "repairing" not in done.stderr


def test_code_that_cannot_be_planned_is_checked_all_the_same(
    faulty: Path, program: Program
) -> None:
    text = MODELING.replace("hidden + self.mix(hidden)", "self.mix(hidden) * torch.ones(1, 32)")
    (faulty / "modeling_faulty.py").write_text(text)
    done = program("check", faulty.name, "--trust-remote-code", *GPUS, *SIZES)
    assert done.returncode == 13
    told = " ".join(done.stdout.split())
    assert "torch.ones(1, 32)" in told
    assert "note: the model can't be planned; its modules were assigned to the devices" in told


@pytest.mark.slow
def test_all_gpus_are_used_where_the_model_has_enough_blocks(tiny: Path, program: Program) -> None:
    for gpus, used in (("virtual:3x64MiB", 3), ("virtual:64x64MiB", 6)):
        done = program("check", tiny, "--gpus", gpus, *SIZES, "--json")
        assert len(json.loads(done.stdout)["devices"]) == used
    assert "the model has blocks for 6 of 64 devices" in done.stdout


def test_code_that_cannot_be_built(faulty: Path, program: Program) -> None:
    text = MODELING.replace("self.post_init()", "self.nothing.at_all")
    (faulty / "modeling_faulty.py").write_text(text)
    options = ("--sarif", "duoka.sarif", "--fix")
    done = program("check", faulty.name, "--trust-remote-code", *GPUS, *SIZES, *options)
    assert done.returncode == 13
    assert "self.nothing.at_all" in done.stdout
    assert f"modeling_faulty.py:{line_of('self.post_init()')}" in done.stdout
    [run] = json.loads(Path("duoka.sarif").read_text(encoding="utf-8"))["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False


@pytest.mark.slow
def test_the_action_of_the_documentation(faulty: Path, program: Program) -> None:
    page = Path(__file__).parents[2] / "docs" / "check.md"
    [snippet] = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    steps = yaml.safe_load(snippet)["jobs"]["check"]["steps"]
    [command] = [step["run"] for step in steps if "duoka check" in step.get("run", "")]
    [upload] = [step["with"] for step in steps if "upload-sarif" in step.get("uses", "")]
    text = MODELING.replace("hidden + self.mix(hidden)", "self.mix(hidden) * torch.ones(1, 32)")
    (faulty / "modeling_faulty.py").write_text(text)
    faulty.rename("model")
    _, *arguments = shlex.split(command)
    assert program(*arguments).returncode == 13
    [run] = json.loads(Path(upload["sarif_file"]).read_text(encoding="utf-8"))["runs"]
    assert len(run["results"]) >= 1


@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_what_was_found_is_told_also_where_nothing_can_be_written(
    json_option: tuple[str, ...], faulty: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(patches: Any) -> None:
        raise MachineError("the disk is full")

    monkeypatch.setattr("duoka.checker.fix.apply_in_place", refuse)
    done = check(program, faulty, *SIZES, "--fix", "--in-place", *json_option)
    assert done.returncode == 12
    assert "modeling_faulty.py" in done.stdout
    assert "+        gathered = " in done.stdout
    assert "error: the disk is full" in done.stderr
