"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import chatglm_files
import fork_server
import pytest
import turns
import warm_up
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from duoka.base.garbage import freeze_objects
from duoka.base.quiet import quiet_libraries
from duoka.forecast.serving import Capacity
from duoka.forecast.workload import Workload

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

_TESTS = Path(__file__).resolve().parent
# Time limits per example say more about the machine's load than about the code. `make test` takes
# the quick profile, CI its own; a test that says how many examples it wants says it with
# `fuzzing.examples`. Inputs that failed are kept, in DUOKA_EXAMPLES or beside the tests.
_EXAMPLES = os.environ.get("DUOKA_EXAMPLES") or _TESTS.parent / ".hypothesis" / "examples"
settings.register_profile(
    "full",
    max_examples=100,
    database=DirectoryBasedExampleDatabase(_EXAMPLES),
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("full"), max_examples=50)
settings.register_profile("quick", settings.get_profile("full"), max_examples=20)
settings.load_profile("full")

_LATER = "slow", "nightly"
_DEFAULT_SHARED = _TESTS.parents[1] / "shared" / "data"


def pytest_report_header() -> str:
    """Name the turn of this run, with which the same is tested again."""
    return f"turn: {turns.VARIABLE}={os.environ[turns.VARIABLE]} (see tests/turns.py)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and tests out of garbage collection.

    They are a million objects, and each load of a model and each check collects garbage. Modules
    that import peft needn't import the compiler with it.
    """
    gc.disable()
    try:
        with quiet_libraries():
            return (yield)
    finally:
        freeze_objects()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark what is slow, what is left to the night, and what starts programs.

    On CUDA workspaces are PyTorch's own. Tests of the house itself, which lie in its root, look at
    every file each time, so none of their cases is left out.
    """
    for item in items:
        if turns.is_slow(item.nodeid):
            item.add_marker("slow")
    _leave_to_the_night(items)
    _leave_out_of_the_quick_run(items)
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("cuda_rig"):
            item.fixturenames.append("own_workspaces")
        if "process" in getattr(item, "fixturenames", ()):
            item.add_marker("process")


def _leave_to_the_night(items: list[pytest.Function]) -> None:
    """Mark tests of `turns.NIGHTLY`, and slow tests and slow cases whose turn it isn't."""
    others = []
    for item in items:
        if item.nodeid in turns.NIGHTLY:
            item.add_marker("nightly")
        elif item.get_closest_marker("slow"):
            others.append(item)
    tests = list(_cases(others))
    due = set(turns.in_turn([cases[0] for cases in tests if len(cases) == 1]))
    for cases in tests:
        if len(cases) > 1:
            due.update(turns.in_turn(cases, min(turns.PARTS, len(cases))))
    for item in {item for cases in tests for item in cases} - due:
        item.add_marker("nightly")


def _leave_out_of_the_quick_run(items: list[pytest.Function]) -> None:
    """Mark all but the first case of each test: together they are slow, and a twelfth is due."""
    for cases in _cases(item for item in items if not any(map(item.get_closest_marker, _LATER))):
        due = set(turns.in_turn(cases[1:]))
        for item in cases[1:]:
            item.add_marker("slow" if item in due else "nightly")


def _cases(items: Iterable[pytest.Function]) -> Iterable[list[pytest.Function]]:
    """Return the cases of each test, but for those of the house."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.path.parent != _TESTS:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


@pytest.fixture
def own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's workspaces as PyTorch takes them where nobody says otherwise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(scope="module", autouse=True)
def short_warm_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines try out the largest step alone, where a test doesn't ask for `every_step`."""
    if request.path.is_relative_to(_TESTS / "cuda_rig"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Capacity, "warm_up_steps", warm_up.largest_step)
        yield


@pytest.fixture(scope="module")
def single_sequences(shared_directory: Path) -> Iterator[None]:
    """Plans of one sequence trace the steps of one sequence alone, which are a third of all.

    For modules that plan such workloads, and are about other things than batches. Their profiles
    have a cache of their own: other modules expect those of all workloads.
    """
    # Imported here and not before collection: transformers would import libraries that start CUDA.
    from duoka.tracing import get_profile

    trace = get_profile._trace

    def trace_less(build: Any, spec: Any, workload: Workload, *, batched: bool) -> Any:
        return trace(build, spec, workload, batched=batched and workload.batch > 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOKA_CACHE", str(shared_directory / "single_sequences"))
        patch.setattr(get_profile, "_trace", trace_less)
        yield


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines try out steps of every size, as for users, so that no later step needs memory."""
    monkeypatch.setattr(Capacity, "warm_up_steps", warm_up.every_step)


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


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this test run, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def own_cache(shared_directory: Path) -> Iterator[Path]:
    """Profiles are cached in a directory of this test run, not in the user's.

    Its workers share it: what one has traced, the other needn't.
    """
    directory = shared_directory / "profiles"
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
def forking_python(shared_directory: Path) -> Path:
    """A program to call in Python's place: torch and transformers are imported already."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return fork_server.forking_python(
        shared_directory / "forks", os.getppid() if is_worker else os.getpid()
    )


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
