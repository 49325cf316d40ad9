"""What shells complete: commands, options, values; and files, which they complete themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shellingham
from typer import rich_utils

from duoka.cli.main import run

SHELLS = ("bash", "zsh", "fish")
MORE = ["cosine_with_restarts", "polynomial", "inverse_sqrt"]
WORDS = [
    (["b"], ["bench"]),
    (["plan", "--ob"], ["--objective"]),
    (["plan", "--objective", "l"], ["latency"]),
    (["tune", "a", "b", "--lr-schedule", ""], ["cosine", "linear", "constant", *MORE]),
]
FILES = [["plan", "./m"], ["plan", "--save", "m"], ["merge", "m"]]


def script_of(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What --show-completion prints in a shell, and its messages."""
    monkeypatch.setattr(shellingham, "detect_shell", lambda: (shell, f"/bin/{shell}"))
    assert run(["--show-completion"]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_asks_duoka(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = script_of(shell, monkeypatch, capsys)
    assert f"_DUOKA_COMPLETE=complete_{shell}" in out
    assert err == ""
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=out, text=True, check=True)


@pytest.mark.parametrize(("words", "expected"), [*WORDS, *((words, []) for words in FILES)])
@pytest.mark.parametrize("shell", SHELLS)
def test_words(
    words: list[str],
    expected: list[str],
    shell: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", None)  # restored after the test
    monkeypatch.setenv("_DUOKA_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["duoka", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["duoka", *words]))
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert run([]) == 0
    out = capsys.readouterr().out
    if shell == "zsh":
        assert all(f'"{word}"' in out for word in expected)
        assert expected or out == "_files\n"
    else:
        assert [line.partition("\t")[0] for line in out.split("\n") if line] == expected


def test_bash_completes_duoka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As installed: the script is read, and asks a program without torch."""
    shown, _ = script_of("bash", monkeypatch, capsys)
    duoka = tmp_path / "duoka"
    check = "import sys, os, atexit; from duoka.cli.main import run; code = run()"
    duoka.write_text(
        f"#!{sys.executable}\n{check}; assert 'torch' not in sys.modules; sys.exit(code)\n"
    )
    duoka.chmod(0o700)
    script = (
        'eval "$2"; COMP_WORDS=(duoka plan --quantize i); COMP_CWORD=3; '
        '_duoka_completion "$1"; echo "${COMPREPLY[@]}"; complete -p duoka'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", str(duoka), shown],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "int8 int4\ncomplete -o default -F _duoka_completion duoka\n"
