"""Models on the Hub, from the command line."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
from hub_server import COMMIT, HubServer, Repo
from progress import without_progress

from duoka import Plan

from .conftest import GPUS, PROGRAM, SIZES, Program

NAME = "org/tiny"


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server.serve() as server:
        files = {file.name: file.read_bytes() for file in tiny.iterdir()}
        server.repos[NAME] = Repo(files=files)
        hub_server.use(server, tmp_path, monkeypatch)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield server
    huggingface_hub.close_session()


@pytest.mark.slow
def test_generate_is_what_the_directory_generates(
    hub: HubServer, tiny: Path, program: Program
) -> None:
    arguments = (*GPUS, *SIZES, "-p", "hello")
    done = program("generate", NAME, *arguments)
    assert done.stdout == program("generate", tiny, *arguments).stdout
    assert done.returncode == 0
    assert without_progress(done.stderr).startswith("ChatGLMForCausalLM on vgpu:0\n")
    hub.requests.clear()
    again = program("generate", f"{NAME}@{COMMIT}", *arguments)
    assert (again.stdout, hub.requests) == (done.stdout, [])


def test_a_plan_keeps_the_commit(hub: HubServer, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "tiny.plan"
    done = program("plan", NAME, "--revision", "main", *GPUS, *SIZES, "--save", saved)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(saved)
    assert plan.source == f"{NAME}@{COMMIT}"
    assert {request.path.rpartition("/")[2] for request in hub.requests} >= {"config.json"}
    assert not any("tokenizer" in request.path for request in hub.requests)
    # The branch moves on; the plan doesn't.
    repo = hub.repos[NAME]
    repo.revisions = {"main": "f" * 40, "old": COMMIT}
    done = program("generate", "--plan", saved, "-p", "hello")
    assert done.returncode == 0, done.stderr
    assert not any("f" * 40 in request.path for request in hub.requests)


def test_the_plan_of_a_directory_serves_the_hub(
    hub: HubServer, tiny: Path, program: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "tiny.plan"
    program("plan", tiny, *GPUS, *SIZES, "--save", saved)
    done = program("generate", NAME, "--plan", saved, "-p", "hello")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "check", "generate", "chat"])
def test_an_error_is_one_message_and_a_hint(command: str, hub: HubServer, program: Program) -> None:
    hub.repos[NAME].gated = True
    asked = ("-p", "x") if command == "generate" else ()
    done = program(command, NAME, *GPUS, *SIZES, *asked)
    assert (done.returncode, done.stdout) == (4, "")
    assert without_progress(done.stderr) == (
        "error: org/tiny is gated: its authors must grant you access\n"
        "hint: request access at https://huggingface.co/org/tiny; for private repositories log "
        "in: hf auth login\n"
    )


def test_a_wrong_file_stops_before_anything_is_loaded(hub: HubServer, program: Program) -> None:
    assert program("plan", NAME, *GPUS, *SIZES).returncode == 0
    hub.next("storage", hub_server.spoil)
    done = program("generate", NAME, *GPUS, *SIZES, "-p", "x")
    assert (done.returncode, done.stdout) == (4, "")
    assert "differs from the content that" in done.stderr


def test_no_token_is_shown_with_debug(
    hub: HubServer, program: Program, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environment, "HF_TOKEN", "hf_badtoken00000")
    done = program("plan", NAME, *GPUS, "--debug")
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert "badtoken" not in done.stderr


@pytest.mark.parametrize("place", ["api", "storage"])
def test_ctrl_c_while_the_hub_is_asked(
    place: str, hub: HubServer, environment: dict[str, str], tmp_path: Path
) -> None:
    stalled, over = threading.Event(), threading.Event()

    def stall(handler: hub_server.Handler, normal: Callable[[], None]) -> None:
        stalled.set()
        over.wait(600)
        handler.hang_up()

    hub.next(place, stall)
    asked = {
        **{name: value for name, value in environment.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "DUOKA_CACHE": str(tmp_path / "cache"),
    }
    process = subprocess.Popen(
        [*PROGRAM, "plan", NAME, *GPUS, *SIZES],
        env=asked,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert stalled.wait(240)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    # The Hub is still silent: the program didn't wait for it.
    assert not over.is_set()
    over.set()
    assert (process.returncode, out, without_progress(err)) == (130, "", "stopped\n")
    assert not list((tmp_path / "home").rglob("*.incomplete"))


CODE = """\
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("ran").touch()


class Config(LlamaConfig):
    model_type = "home_made"


class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def home_made(hub: HubServer) -> Repo:
    """A model that only its own code knows."""
    config = {
        "model_type": "home_made",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "dtype": "float32",
    }
    files = {"config.json": json.dumps(config).encode(), "own.py": CODE.encode()}
    hub.repos["org/own"] = Repo(files=files)
    return hub.repos["org/own"]


def test_code_does_not_run_unless_asked_for(home_made: Repo, program: Program) -> None:
    done = program("plan", "org/own", *GPUS)
    assert done.returncode == 5
    assert "needs --trust-remote-code" in done.stderr


def test_code_is_shown_before_it_runs(home_made: Repo, program: Program) -> None:
    done = program("plan", "org/own", *GPUS, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    first, second, *_ = without_progress(done.stderr).splitlines()
    assert first.startswith(f"code of org/own@{COMMIT} is allowed to run, adapted from")
    assert second == f"  own.py  sha256 {digest}"


def test_code_from_another_repository_is_refused(home_made: Repo, program: Program) -> None:
    config = json.loads(home_made.files["config.json"])
    config["auto_map"]["AutoModelForCausalLM"] = "other/repo--own.Model"
    home_made.files["config.json"] = json.dumps(config).encode()
    done = program("plan", "org/own", *GPUS, "--trust-remote-code")
    assert done.returncode == 5
    assert "refers to 'other/repo--own.Model', which is code of another repository" in done.stderr
