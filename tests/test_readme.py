"""The documentation is true: its commands are run, and what they print is compared.

A block after the comment ``<!-- run -->`` is run: in ``console`` blocks every line that begins
with ``$``, in ``python`` blocks all of it. They run one after the other in a directory where
``glm-4-9b-chat`` and ``chatglm3-6b`` hold the published configs and indices, and no weights. What a
console block shows must be printed, line by line, but for small differences in what is measured;
a line of ``…`` stands for anything.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from progress import without_progress

import duoka
from duoka import errors
from duoka.cli import errors as failures
from duoka.cli.main import app, run
from duoka.planner.planner import attempt
from duoka.planner.request import PlanProblem
from duoka.planner.resolve import workload_for
from duoka.tracing.get_profile import profile_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "README.zh-CN.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
# Memory forecasts, and contexts that fit: they change a little with versions of torch.
_NUMBER = re.compile(r"\d+\.\d\d|\d{5,}")
_BAR = re.compile("[█▓▒░·]{4,}")
# A command of duoka's own runs in this process: torch need not be imported for each.
_OWN = re.compile(r"duoka ([^|&;<>$`]+?)(\|\| echo \"exit code \$\?\")?\s*", re.DOTALL)
_BLOCK = re.compile(r"<!-- run -->\n+```(console|python)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a page, and what the page shows as its output."""

    arguments: list[str]
    shown: str


def commands(page: str) -> list[Command]:
    found = []
    for language, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "python":
            found.append(Command(arguments=[sys.executable, "-c", text], shown=""))
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.replace("\\\n", " ").partition("\n")
            found.append(Command(arguments=["bash", "-c", line], shown=shown))
    return found


def pattern(shown: str) -> str:
    """A regular expression for what a page shows; its groups are the measured numbers."""
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
    return [re.escape(word).replace(r"\.", ".") for word in line.split()]


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "96")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # as people run it
    return tmp_path


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
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run(shlex.split(own[1]))
        if own[2] and code:
            sys.stdout.write(f"exit code {code}\n")
            code = 0
    return code, out.getvalue() + without_progress(err.getvalue())


# The other README shows the same commands and outputs, which is tested below.
# A program and a block of Python, which start as they do for people.
NO_FORKS = ("docs/exports.md", "docs/virtual-gpus.md")
RUN = [page for page in PAGES if commands(page) and page != "README.zh-CN.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands(page: str, workplace: Path, request: pytest.FixtureRequest) -> None:
    if page not in NO_FORKS:
        request.getfixturevalue("quick_programs")
    for command in commands(page):
        code, printed = outcome(command)
        what = f"{page}: {command.arguments[-1]}\n{printed}"
        assert code == 0, what
        assert is_shown(command.shown, printed), what


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


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
            assert attempt(profile_checkpoint(checkpoint, workload), problem) is None
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


def options_of(command: Any) -> set[str]:
    return {name for option in command.params for name in option.opts if name.startswith("--")}


def test_every_option_and_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(--[a-z-]+)", page))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == set(re.findall(r"^duoka (\w+) ", page, re.MULTILINE)[: len(commands)])
    options = set().union(*(options_of(command) for command in commands.values()))
    assert documented - {"--help", "--version"} == options
    codes = {cls.exit_code for cls in vars(errors).values() if hasattr(cls, "exit_code")}
    ends = {0, failures.DEFECT, failures.BROKEN_PIPE, failures.NOT_OK, failures.WARNED}
    ends |= {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes | ends
