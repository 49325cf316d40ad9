"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chatglm_files
import fork_server
import pytest
import turns
from hypothesis import HealthCheck, settings

# What a person has set for programs is none of the tests' business.
for _name in ("PYTHONUNBUFFERED", "PYTHONWARNINGS", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# Before torch is imported anywhere: the test workers are the parallelism.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small models on small GPUs are about their own memory; what is about workspaces asks for them.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
# Workers inherit it, so that all collect the same families.
os.environ.setdefault(turns.VARIABLE, turns.commit_turn(Path(__file__).parent))

pytest.register_assert_rewrite("matrix")

# Time limits per example say more about the machine's load than about the code. `make test` takes
# the quick profile; a test that says how many examples it wants says it with `fuzzing.examples`.
settings.register_profile(
    "full", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("quick", settings.get_profile("full"), max_examples=20)
settings.load_profile("full")

_TESTS = Path(__file__).resolve().parent
_LATER = "slow", "nightly"
_CASES = 2
_DEFAULT_SHARED = _TESTS.parents[1] / "shared" / "data"


def pytest_report_header() -> str:
    """Name the part of the families that this run tests, and the way to test it again."""
    return f"families by turn: {turns.VARIABLE}={os.environ[turns.VARIABLE]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark those that start programs with the fixture for it; on CUDA workspaces are its own.

    Of a test with many cases `make test` has a few, and `make test-all` the others, which are slow
    all together. Tests of the house itself, which lie in its root, look at every file each time.
    """
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.path.parent != _TESTS and not any(map(item.get_closest_marker, _LATER)):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        for item in set(alike) - set(alike[:: -(-len(alike) // _CASES)]):
            item.add_marker("slow")
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("cuda_rig"):
            item.fixturenames.append("own_workspaces")
        if "process" in getattr(item, "fixturenames", ()):
            item.add_marker("process")


@pytest.fixture
def own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspaces as PyTorch takes them where nobody says otherwise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The published tokenizers, which the project doesn't contain.

    They lie beside the checkout, or where DUOKA_SHARED says.
    """
    root = Path(os.environ.get("DUOKA_SHARED", _DEFAULT_SHARED))
    if not root.is_dir():
        pytest.skip(f"no reference data at {root}; set DUOKA_SHARED to its directory")
    return root


@pytest.fixture(scope="session")
def published_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published configs and indices, and tiny models with what the original code computes."""
    root = tmp_path_factory.mktemp("published")
    chatglm_files.write_all(root)
    return root


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Profiles are cached in a directory of this test run, not in the user's.

    Its workers share it: what one has traced, the other needn't.
    """
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOKA_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session", autouse=True)
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this process says of its memory isn't in the directory of the user's processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duoka.report.live._ROOT", tmp_path_factory.mktemp("live"))
        yield


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A program to call in Python's place: torch and transformers are imported already."""
    with fork_server.forking_python(tmp_path_factory.mktemp("forks")) as program:
        yield program


@pytest.fixture(scope="session")
def python() -> str:
    """Python itself, for processes that are to start the real way."""
    return sys.executable


@pytest.fixture
def quick_start(python: str, forking_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that are started as ``sys.executable`` be forks: see `fork_server`."""
    monkeypatch.setattr(sys, "executable", str(forking_python))


@pytest.fixture(scope="module")
def quick_workers(python: str, forking_python: Path) -> Iterator[None]:
    """The same for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(forking_python))
        yield


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of matplotlib that a test saves."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
