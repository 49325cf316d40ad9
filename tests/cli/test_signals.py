"""Ctrl-C, SIGTERM and SIGHUP at many moments: one word, the right exit code, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import GPUS, PROGRAM, SIZES
from .terminals import Terminal

pytestmark = pytest.mark.process

# What a small program does with the signals after `signals.install()`.
FRAME = """
import gc, os, signal, sys, threading, time, _thread
signal.signal(signal.SIGINT, signal.default_int_handler)
from duoka.cli import signals
signals.install()
def say(*what): print(*what, flush=True)
def later(seconds, act): threading.Timer(seconds, act).start()
def press(): os.kill(os.getpid(), signal.SIGINT)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FRAME + code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_second_one_leaves_the_clean_up_alone() -> None:
    done = run(
        "try:\n"
        "    try: press(); time.sleep(30)\n"
        "    finally: press(); press(); time.sleep(0.3); say('clean')\n"
        "except KeyboardInterrupt: signals.forget(); say('once')\n"
        "time.sleep(0.3); say('on')\n"
        "try: press(); time.sleep(30)\n"
        "except KeyboardInterrupt: say('again')\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("clean\nonce\non\nagain\n", "", 0)


def test_a_clean_up_without_end_can_be_left() -> None:
    done = run(
        "signals._IGNORE_SECONDS = 0.2\n"
        "later(0.5, press)\n"
        "try:\n"
        "    try: press(); time.sleep(30)\n"
        "    finally:\n"
        "        while True: time.sleep(0.1)\n"
        "except KeyboardInterrupt: say('left')\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("left\n", "", 0)


def test_one_that_a_library_swallowed_is_sent_again() -> None:
    done = run(
        "signals._IGNORE_SECONDS = 0.2\n"
        "try: press(); time.sleep(5)\n"
        "except BaseException: pass\n"
        "time.sleep(0.3)\n"
        "try: press(); time.sleep(30)\n"
        "except KeyboardInterrupt: say('taken')\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("taken\n", "", 0)


def test_torch_is_imported_to_its_end_first(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("press(); time.sleep(0.3); say('whole')\n")
    done = run(
        f"import builtins; sys.path.insert(0, {str(tmp_path)!r})\n"
        "builtins.press, builtins.time, builtins.say = press, time, say\n"
        "try:\n"
        "    import torch; time.sleep(30)\n"
        "except KeyboardInterrupt: say('stopped', signals.stopped_by() == signal.SIGINT)\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("whole\nstopped True\n", "", 0)


# Each lets `press` run where Python, torch or asyncio drop an exception, and says what was done.
DROPPED = {
    "destructor": "class A:\n    def __del__(self): press(); time.sleep(0.2); say('done')\nA()\n",
    "finalizer": (
        "import weakref\nclass A: pass\na = A()\n"
        "def told(): say('done'); press(); time.sleep(5)\n"
        "weakref.finalize(a, told); del a\n"
    ),
    "C": (
        "import ctypes\n"
        "def told(): say('done'); press(); time.sleep(5)\n"
        "ctypes.CFUNCTYPE(None)(told)()\n"
    ),
    "asyncio": (
        "import asyncio\n"
        "async def told(): press(); time.sleep(0.2); say('done'); await asyncio.sleep(30)\n"
        "asyncio.run(told())\n"
    ),
}


@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", DROPPED)
def test_one_where_exceptions_are_dropped_is_raised_afterwards(where: str, signum: str) -> None:
    inside = "".join(f"    {line}\n" for line in DROPPED[where].splitlines())
    done = run(
        f"def press(): os.kill(os.getpid(), signal.{signum})\n"
        f"try:\n{inside}    time.sleep(20); say('went on')\n"
        "except (KeyboardInterrupt, signals.Terminated): say(signals.stopped_by())\n"
    )
    told = f"done\n{int(getattr(signal, signum))}\n"
    assert (done.stdout, done.stderr, done.returncode) == (told, "", 0)


def test_other_exceptions_of_destructors_are_told() -> None:
    done = run("class A:\n    def __del__(self): raise ValueError('odd')\nA(); say('on')\n")
    assert (done.stdout, done.returncode) == ("on\n", 0)
    assert "ValueError: odd" in done.stderr


def test_a_free_that_a_signal_interrupts_is_counted() -> None:
    done = run(
        "import torch, duoka.virtual as virtual\n"
        "from duoka.virtual import world\n"
        "virtual.set_gpus([1 << 30])\n"
        "a = torch.empty(1 << 20, device='vgpu:0')\n"
        "free = world.VirtualGpu.free\n"
        "def slow(self, allocation): press(); time.sleep(0.2); free(self, allocation)\n"
        "world.VirtualGpu.free = slow\n"
        "try: del a; time.sleep(30)\n"
        "except KeyboardInterrupt: say(world.active_world().memory_allocated(0))\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_signals_that_the_parent_ignored_stay_ignored() -> None:
    code = FRAME.replace("default_int_handler", "SIG_IGN") + "press(); time.sleep(0.2); say('on')"
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{code}\n"
    ignoring += "os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.2); say('still')"
    done = subprocess.run(
        [sys.executable, "-c", ignoring], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("on\nstill\n", "", 0)


# It says when its handlers are there: before, a signal ends it as it ends any program.
BEGIN = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from duoka.cli import main, signals; signals.install(); os.write({tell}, b'x'); main()"
)


def stopped(
    arguments: list[str], environment: dict[str, str], seconds: float, signum: int, again: bool
) -> tuple[int, str, str]:
    """Run a command, send it a signal after some time, and perhaps the same once more."""
    ready, tell = os.pipe()
    process = subprocess.Popen(
        [PROGRAM[0], "-c", BEGIN.format(tell=tell), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=(tell,),
    )
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(seconds)
    process.send_signal(signum)
    if again:
        time.sleep(0.1)
        process.send_signal(signum)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


COMMANDS = ("plan", "check", "generate", "demo")
MOMENTS = [("plan", 0.4), ("plan", 2.4), ("check", 4.0), ("generate", 2.4), ("demo", 1.3)]
if "DUOKA_FUZZ_EXAMPLES" in os.environ:
    MOMENTS = [(command, number / 5) for command in COMMANDS for number in range(2, 50)]


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize(("command", "seconds"), MOMENTS)
def test_at_any_moment(
    command: str, seconds: float, tiny: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    signum = (signal.SIGINT, signal.SIGTERM)[int(seconds * 10) % 2]
    arguments = {
        "plan": ["plan", str(tiny), *GPUS, *SIZES, "--save", str(tmp_path / "saved")],
        "check": ["check", str(tiny), *GPUS, *SIZES, "--sarif", str(tmp_path / "saved")],
        "generate": ["generate", str(tiny), *GPUS, "--new-tokens", "900", "-p", "hi"],
        "demo": ["demo", "--keep", str(tmp_path / "kept")],
    }[command]
    (tmp_path / "cache").mkdir()
    inside = {**environment, "DUOKA_CACHE": str(tmp_path / "cache")}
    code, _, err = stopped(arguments, inside, seconds, signum, again=seconds > 1)
    left = {file.name for file in tmp_path.rglob("*")}
    assert not [name for name in left if name.endswith(".partial")]
    if code == 0:  # it was faster
        return
    assert code == 128 + signum, err
    assert err.splitlines()[-1] == "stopped"
    assert "Traceback" not in err
    # Saved just before the signal came, or not at all.
    assert "saved" not in left or "saved to" in err
    assert "kept" not in left or "config.json" in left


@pytest.mark.slow
def test_a_terminal_is_left_in_order(environment: dict[str, str]) -> None:
    terminal = Terminal(["demo"], environment)
    try:
        terminal.wait_for(r"training a small")
        time.sleep(0.5)
        terminal.send("\x03")
        seen = terminal.rest()
        assert terminal.process.wait(timeout=120) == 130
        assert seen.rstrip().endswith("stopped")
        assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")  # the cursor is shown
        assert "Traceback" not in seen
        assert terminal.echoes
    finally:
        terminal.close()


@pytest.mark.slow
def test_a_terminal_that_goes_away(tiny: Path, environment: dict[str, str]) -> None:
    terminal = Terminal(["chat", str(tiny), *GPUS, *SIZES], environment)
    try:
        terminal.wait_for("> ")
        terminal.hang_up()
        assert terminal.process.wait(timeout=120) == 129
    finally:
        terminal.close()
