"""Models on ModelScope, from the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hub_server
import modelscope_server
import pytest
from hub_server import COMMIT, HubServer, Repo
from modelscope_server import ModelScope
from progress import without_progress

from duoka import Plan

from .conftest import GPUS, PROGRAM, SIZES, Program

pytest.importorskip("modelscope_hub")

NAME = "modelscope:org/tiny"
LINE = json.dumps({"prompt": "hello", "completion": "hello again"})


@pytest.fixture
def scope(
    tiny: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[HubServer]:
    with hub_server.serve(ModelScope) as server:
        files = {file.name: file.read_bytes() for file in tiny.iterdir()}
        server.repos["org/tiny"] = Repo(files=files, revisions={"master": COMMIT, "v1": COMMIT})
        modelscope_server.use(server, tmp_path, monkeypatch)
        for name, value in modelscope_server.environment(server, tmp_path).items():
            monkeypatch.setitem(environment, name, value)
        yield server


@pytest.mark.slow
@pytest.mark.process
def test_generate_is_what_the_directory_generates(
    scope: HubServer, tiny: Path, program: Program, environment: dict[str, str]
) -> None:
    arguments = (*GPUS, *SIZES, "-p", "hello")
    # A program of its own: the client has its bars and its log where it was imported before.
    done = subprocess.run(
        [*PROGRAM, "generate", NAME, *arguments],
        env={name: value for name, value in environment.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == program("generate", tiny, *arguments).stdout
    assert without_progress(done.stderr).startswith("ChatGLMForCausalLM on vgpu:0\n")


def test_a_plan_names_modelscope_and_the_revision(
    scope: HubServer, program: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "tiny.plan"
    done = program("plan", NAME, "--revision", "v1", *GPUS, *SIZES, "--save", saved)
    assert done.returncode == 0, done.stderr
    assert Plan.load(saved).source == f"{NAME}@v1"
    assert not any("tokenizer" in request.path for request in scope.requests)
    done = program("generate", "--plan", saved, "-p", "hello")
    assert done.returncode == 0, done.stderr
    assert all("Revision=v1" in request.path for request in scope.requests)


@pytest.mark.slow
def test_an_adapter_names_the_repository(
    scope: HubServer, program: Program, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(f"{LINE}\n" * 4)
    saved = tmp_path / "run"
    done = program("tune", NAME, tmp_path / "data.jsonl", *GPUS, "--steps", "1", "--save", saved)
    assert done.returncode == 0, done.stderr
    config = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"


@pytest.mark.parametrize("command", ["plan", "check", "generate", "chat", "serve", "bench", "tune"])
def test_an_error_is_one_message_and_a_hint(
    command: str, scope: HubServer, program: Program, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(f"{LINE}\n")
    more = {
        "generate": ("-p", "x"),
        "tune": (tmp_path / "data.jsonl", "--save", tmp_path / "run"),
    }
    done = program(command, "modelscope:org/nothing", *more.get(command, ()), *GPUS)
    assert (done.returncode, done.stdout) == (4, "")
    assert without_progress(done.stderr) == (
        f"error: {scope.url} has no such repository, revision or file: modelscope:org/nothing\n"
        "hint: check the spelling (ZhipuAI on ModelScope is zai-org on the Hub); for private "
        "repositories log in: modelscope login\n"
    )


def test_without_the_package(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.base.requirements.find_spec", lambda name: None)
    done = program("plan", NAME, *GPUS)
    assert (done.returncode, without_progress(done.stderr)) == (
        2,
        "error: models on ModelScope need modelscope_hub, which isn't installed\n"
        'hint: pip install "duoka[modelscope]"\n',
    )
