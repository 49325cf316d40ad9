"""The documentation is true: its commands are run, and what they print is compared.

A block after the comment ``<!-- run -->`` is run: in ``console`` blocks every line that begins
with ``$``, in ``python`` blocks all of it. They run one after the other in a directory where
``glm-4-9b-chat`` and ``chatglm3-6b`` hold the published configs and indices, and no weights, and
``glm-4.5-air`` has a config with the sizes of that model. What a console block shows must be
printed, line by line, but for small differences in what is measured; a line of ``…`` stands for
anything.

The pages of docs/situations and the tutorial say besides on what a block is run: ``<!-- run on
eight-3090 -->`` on a recorded machine, ``<!-- run on code -->`` with the code that comes with a
checkpoint, and ``<!-- run on virtual:2x8GiB -->`` with weights, on these GPUs in the place of those
that the page names, or of all; see `newcomer`. ``exit 13`` there is how the last command ends.
``<!-- run on demo -->`` in the tutorial is run with the model of ``duoka demo`` as ``demo-model``,
and its server stays for the commands that follow. The tutorial's rows of JSON are in
``train.jsonl``.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import newcomer
import pytest
import reference
from doctoring import machine
from progress import without_progress
from reference import VARIABLES
from turns import in_turn

import duoka
from duoka.cli.main import run
from duoka.planner.request import PlanProblem
from duoka.planner.resolve import workload_for
from duoka.planner.solve import solve
from duoka.tools.demo.checkpoint import make_checkpoint
from duoka.tracing.get_profile import profile_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "README.zh-CN.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
SITUATIONS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/situations").glob("*.md"))
ENGLISH = [page for page in SITUATIONS if not page.endswith(".zh-CN.md")]
TUTORIAL = "docs/tutorial.md"
SERVER_SECONDS = 180
# Memory forecasts, losses, and contexts that fit: they change a little with versions of torch.
# The number of a version is none of those.
_NUMBER = re.compile(r"(?<![\d.])\d+\.\d\d(?:\d\d)?(?!\d|\.\d)|\d{5,}")
_BAR = re.compile("[█▓▒░·]{4,}")
# A command of duoka's own runs in this process: torch need not be imported for each.
_OWN = re.compile(r"duoka ([^|&;<>$`]+?)(\|\| echo \"exit code \$\?\")?\s*", re.DOTALL)
_BLOCK = re.compile(
    r"<!-- run(?: on ([\w:-]+))?(?:, exit (\d+))? -->\n+ *```(console|python)\n(.*?)```", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a page, and what the page shows as its output."""

    arguments: list[str]
    shown: str
    place: str = ""
    code: int = 0


def commands(page: str) -> list[Command]:
    found = []
    blocks = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    for place, code, language, indented in blocks:
        text = dedent(indented)
        if language == "python":
            found.append(Command(arguments=[sys.executable, "-c", text], shown="", place=place))
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.replace("\\\n", " ").partition("\n")
            found.append(Command(arguments=["bash", "-c", line], shown=shown, place=place))
        found[-1] = replace(found[-1], code=int(code or 0))
    return found


def pattern(shown: str) -> str:
    """A regular expression for what a page shows; its groups are the measured numbers.

    ``…`` stands for any lines, or for a part of one.
    """
    lines = []
    for line in shown.rstrip().splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
        else:
            words = [_BAR.sub("[█▓▒░·]+", _NUMBER.sub(r"([\\d.]+)", word)) for word in _words(line)]
            lines.append(r"\s*" + r"\s+".join(words) + r"\s*\n")
    return "".join(lines)


def _words(line: str) -> list[str]:
    # A number's point stays as it is, so that the number is found afterwards.
    return [re.escape(word).replace(r"\.", ".").replace("…", ".*") for word in line.split()]


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed; what is measured may differ a little."""
    found = re.search(pattern(shown), printed)
    if found is None:
        return False
    expected = [float(number) for number in _NUMBER.findall(shown)]
    return [float(number) for number in found.groups()] == pytest.approx(
        expected, rel=0.02, abs=0.2
    )


@pytest.fixture
def workplace(published_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, index in (
        ("chatglm3-6b", "pytorch_model.bin.index.json"),
        ("glm-4-9b-chat", "model.safetensors.index.json"),
    ):
        (tmp_path / name).mkdir()
        shutil.copy(published_data / "configs" / f"{name}.json", tmp_path / name / "config.json")
        shutil.copy(published_data / "indices" / f"{name}.{index}", tmp_path / name / index)
    shutil.copytree(ROOT / "tests/data/models/glm-4.5-air", tmp_path / "glm-4.5-air")
    as_people_run_it(tmp_path, monkeypatch)
    return tmp_path


def as_people_run_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "96")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def quick_programs(
    workplace: Path,
    quick_start: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let the programs of a page be forks: see `fork_server`."""
    programs = tmp_path_factory.mktemp("programs")
    program = programs / "duoka"
    code = "from duoka.cli import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


def outcome(command: Command) -> tuple[int, str]:
    """The exit code of a command, and what it prints, its errors last."""
    own = _OWN.fullmatch(command.arguments[-1])
    if own is None or command.arguments[0] != "bash":
        done = subprocess.run(command.arguments, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + without_progress(done.stderr)
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", io.StringIO("What is NVLink?\n/exit\n"))
        code = run(shlex.split(own[1]))
        if own[2] and code:
            sys.stdout.write(f"exit code {code}\n")
            code = 0
    return code, out.getvalue() + without_progress(err.getvalue())


# The Chinese pages show the same commands and outputs: see `test_twins`.
# A program and a block of Python, which start as they do for people.
NO_FORKS = ("docs/exports.md", "docs/gpus.md")
RUN = [
    page for page in PAGES if commands(page) and not page.endswith(".zh-CN.md") and page != TUTORIAL
]


# README's at each commit, a twelfth of the others by turn.
@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", *in_turn([p for p in RUN if p != "README.md"])])
def test_commands(page: str, workplace: Path, request: pytest.FixtureRequest) -> None:
    if page not in NO_FORKS:
        request.getfixturevalue("quick_programs")
    for command in commands(page):
        code, printed = outcome(command)
        what = f"{page}: {command.arguments[-1]}\n{printed}"
        assert code == 0, what
        assert is_shown(command.shown, printed), what


@pytest.fixture(scope="session")
def belongings(published_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("newcomer")
    newcomer.write_all(root, published_data)
    return root


def at_its_place(command: Command, root: Path, patch: pytest.MonkeyPatch) -> Command:
    """A command of a situation's page where it is run: with what checkpoints, on what machine."""
    place = command.place
    virtual = place.startswith("virtual:")
    directory = root / ("code" if place == "code" else "small" if virtual else "full")
    for name in newcomer.NAMES:
        Path(name).unlink(missing_ok=True)
        Path(name).symlink_to(directory / name)
    if place and not virtual and place != "code":
        machine(patch, place)
    if not virtual:
        return command
    program, option, line = command.arguments
    changed = re.sub(r'(?<=--gpus )\S+|(?<=")\d(?:,\d)+(?=")', place, line)
    if changed == line:  # all GPUs of the machine
        assert line.startswith("duoka "), "it says nothing of GPUs"
        changed = f"{line.rstrip()} --gpus {place}"
    if "--new-tokens" not in changed:  # random weights rarely choose the end of an answer
        changed = re.sub(r"^duoka (chat|generate) ", r"\g<0>--new-tokens 16 ", changed)
    return replace(command, arguments=[program, option, changed])


@pytest.mark.slow
@pytest.mark.parametrize("page", in_turn([p for p in [*ENGLISH, TUTORIAL] if commands(p)]))
def test_situations(
    page: str, belongings: Path, tmp_path: Path, quick_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_people_run_it(tmp_path, monkeypatch)
    # Of the host that runs the tests nothing is known.
    monkeypatch.setattr(sys.modules["duoka.tools.doctor.diagnose"], "_HOST_CHECKS", ())
    for name in ("cat.jpg", "book.txt"):
        shutil.copy(belongings / name, name)
    write_rows(page)
    for command in commands(page):
        if command.place == "demo":
            continue
        with pytest.MonkeyPatch.context() as patch:
            code, printed = outcome(at_its_place(command, belongings, patch))
        what = f"{page}: {command.arguments[-1]}\n{printed}"
        assert code == command.code, what
        assert is_shown(command.shown, printed), what


def write_rows(page: str) -> None:
    """Write the rows of training data that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for rows in re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        Path("train.jsonl").write_text(rows, encoding="utf-8")


@contextmanager
def served(command: Command) -> Iterator[None]:
    """Run a server that has printed what the page shows."""
    line = f"exec {command.arguments[-1]}"
    log = Path("server.log")
    with log.open("w") as file:
        process = subprocess.Popen(["bash", "-c", line], stdout=file, stderr=file)
    try:
        end = time.monotonic() + SERVER_SECONDS
        while not is_shown(command.shown, without_progress(log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield
        process.terminate()
        assert process.wait(SERVER_SECONDS) == 128 + signal.SIGTERM, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.dist
def test_the_tutorial_on_the_demo_model(quick_programs: None) -> None:
    make_checkpoint(Path("demo-model"))
    write_rows(TUTORIAL)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = str(listener.getsockname()[1])
    changes = {"8232": port, "8000": port, "glm-4-9b-chat": "demo-model"}
    with ExitStack() as server:
        for command in commands(TUTORIAL):
            if command.place != "demo":
                continue
            *before, line = command.arguments
            shown = command.shown.replace("8232", port)
            for old, new in changes.items():
                line = line.replace(old, new)
            changed = replace(command, arguments=[*before, line], shown=shown)
            if line.startswith("duoka serve "):
                server.close()
                server.enter_context(served(changed))
                continue
            code, printed = outcome(changed)
            assert code == 0, f"{line}\n{printed}"
            assert is_shown(shown, printed), f"{line}\n{printed}"


@pytest.mark.parametrize("page", [*ENGLISH, TUTORIAL])
def test_the_same_commands_in_both_languages(page: str) -> None:
    assert commands(page) == commands(page.replace(".md", ".zh-CN.md"))


@pytest.mark.parametrize("page", ENGLISH)
def test_situations_are_short_and_linked(page: str) -> None:
    chinese = page.replace(".md", ".zh-CN.md")
    for each in (page, chinese):
        lines = (ROOT / each).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 110, "a newcomer's page is short"
        index = Path(each).with_name("README.zh-CN.md" if each == chinese else "README.md")
        linked = (ROOT / index).read_text(encoding="utf-8")
        assert Path(each) == index or f"({Path(each).name})" in linked


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *SITUATIONS, "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        if "://" not in target:
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}"


def table_rows(page: str) -> list[tuple[str, int, str, list[float], int | None]]:
    """Model, context, budgets, forecast GiB of each GPU (none where nothing fits), chunk."""
    rows = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and "GiB" in cells[2]:
            sizes = [float(size) for size in re.findall(r"\d+\.\d\d", cells[3])]
            chunk = re.search(r"\b(2048|4096|8192)\b", cells[3])
            context = int(cells[1].replace(",", ""))
            rows.append((cells[0], context, cells[2], sizes, int(chunk[0]) if chunk else None))
    return rows


@pytest.mark.slow
def test_the_table_is_what_is_planned(
    published_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    rows = table_rows("README.md")
    assert len(rows) > 5
    for model, context, budgets, sizes, chunk in rows:
        config = published_data / "configs" / f"{model.lower()}.json"
        workload = duoka.Workload(prompt_tokens=context - 256, new_tokens=256)
        if not sizes:
            # Without what would fit instead, which takes long at such a context.
            checkpoint = duoka.Checkpoint.open(config)
            workload = workload_for(checkpoint, workload)
            problem = PlanProblem(fleet=duoka.Fleet.parse(budgets), workload=workload)
            assert not solve(profile_checkpoint(checkpoint, workload), problem)
            continue
        plan = duoka.plan(config, budgets, workload)
        forecast = [device.reserved_bytes / 2**30 for device in plan.forecast.devices]
        assert forecast == pytest.approx(sizes, rel=0.02, abs=0.2), (model, budgets)
        assert plan.workload.prefill_chunk_tokens == chunk, (model, budgets)


def test_both_tables_are_one() -> None:
    assert table_rows("README.md") == table_rows("README.zh-CN.md")


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = commands("README.md"), commands("README.zh-CN.md")
    assert english == chinese


def test_documented_signatures_are_those_of_the_functions() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    found = re.findall(r"^`duoka\.(\w+)\((\w[^`]*\*, [^`]*)\)`", page, re.MULTILINE)
    assert {name for name, _ in found} >= {"plan", "plan_replicas", "check", "load", "dispatch"}
    for name, arguments in found:
        documented = re.findall(r"(?:^|, )(\w+)(?==|, |$)", " ".join(arguments.split()))
        assert documented == list(inspect.signature(getattr(duoka, name)).parameters), name


def test_the_reference_is_the_program() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: make reference"


def test_every_environment_variable_is_documented() -> None:
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = dict(re.findall(r"""^(\w+) = "([A-Z_]+)"$""", text, re.MULTILINE))
        for found in re.findall(r"environ(?:\.get\(|\[)([^\]),]+)", text):
            read.add(names.get(found, found.strip('"')))
    assert "DUOKA_CACHE" in read
    assert {name for name in read if name.isupper()} - {"_DUOKA_COMPLETE"} <= set(VARIABLES)


def test_the_picture_of_the_plan_shows_the_numbers_of_its_table() -> None:
    picture = (ROOT / "docs" / "plan.svg").read_text(encoding="utf-8")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^ cuda:\d .* (\d+\.\d+)(?: +\d+\.\d+){3} +(\d+\.\d+) +\d+\.00$", page, re.M)
    shown = re.findall(r">(\d+\.\d+) (GiB of weights|of \d+ GiB)<", picture)
    assert len(rows) >= 2
    assert [number for number, _ in shown] == [number for row in rows[:2] for number in row]
