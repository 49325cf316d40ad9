"""Whole command lines: whatever is written, an answer or one message, and never a traceback."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka import errors
from duoka.cli.errors import NOT_OK
from duoka.cli.main import run

CODES = {cls.exit_code for cls in vars(errors).values() if hasattr(cls, "exit_code")}
NUMBERS = (
    st.sampled_from(
        ("1", "2", "8", "96", "1K", "8K", "0", "-1", "1M", "9999999999", "x", "", "1.5")
    )
    | st.integers(-(2**70), 2**70).map(str)
    | st.text(max_size=6)
)
WORDS = st.sampled_from(("auto", "none", "float16", "bfloat16", "headroom", "latency", "é", ""))
GPUS = st.sampled_from(("24GiB", "virtual:2x64MiB", "1MiB", "2x1GiB", "x", "", "64x1B", "vgpu:0"))
OPTIONS = st.one_of(
    st.tuples(st.sampled_from(("--context", "--new-tokens", "--batch")), NUMBERS),
    st.tuples(st.just("--prefill-chunk"), NUMBERS | WORDS),
    st.tuples(st.sampled_from(("--dtype", "--objective")), WORDS | st.text(max_size=6)),
    st.tuples(st.sampled_from(("--use-all", "--json", "--debug", "-x", "--", ""))),
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"})
        patch.setenv("DUOKA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow  # what would fit instead is traced, too
@fuzz(16)
@given(gpus=GPUS | st.text(max_size=10), chosen=st.lists(OPTIONS, max_size=4))
def test_plan(small_checkpoint: Path, gpus: str, chosen: list[tuple[str, ...]]) -> None:
    given_options = [part for option in chosen for part in option]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["plan", str(small_checkpoint), "--gpus", gpus, *given_options])
    told = err.getvalue()
    assert code in CODES | {0}, told
    in_json = code == errors.InfeasibleError.exit_code and "--json" in given_options
    assert (code == 0 or in_json) == bool(out.getvalue())
    if code:
        assert told.count("error: ") == 1
        assert "Traceback" not in told or "--debug" in given_options


CHECKING = st.one_of(
    st.tuples(st.sampled_from(("--context", "--new-tokens", "--batch")), NUMBERS),
    st.tuples(st.just("--dtype"), WORDS | st.text(max_size=6)),
    st.tuples(st.just("--image"), st.sampled_from(("28x28", "0x0", "-1x3", "1e9x2", "/", ""))),
    st.tuples(st.just("--image"), st.text(max_size=8)),
    st.tuples(st.sampled_from(("--train", "--json", "--in-place", "--debug", "-x", "--"))),
)


@pytest.mark.slow
@fuzz(30)
@given(gpus=GPUS | st.text(max_size=10), chosen=st.lists(CHECKING, max_size=4))
def test_check(small_checkpoint: Path, gpus: str, chosen: list[tuple[str, ...]]) -> None:
    given_options = [part for option in chosen for part in option]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(["check", str(small_checkpoint), "--gpus", gpus, *given_options])
    told = err.getvalue()
    assert code in CODES | {0, NOT_OK}, told
    assert (code in (0, NOT_OK)) == bool(out.getvalue())
    if code not in (0, NOT_OK):
        assert told.count("error: ") == 1
        assert "Traceback" not in told or "--debug" in given_options
