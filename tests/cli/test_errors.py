from __future__ import annotations

import pytest
import torch
import typer

from duoka import errors
from duoka.cli.errors import BROKEN_PIPE, DEFECT, HUNG_UP, INTERRUPTED, TERMINATED, report


def classes() -> list[type[errors.DuokaError]]:
    found = [errors.DuokaError]
    for cls in found:
        found += cls.__subclasses__()
    return [cls for cls in found if cls.__module__ == errors.__name__]


def raised(error: Exception) -> Exception:
    """With a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_a_mistake_is_one_message_a_hint_and_its_code(
    cls: type[errors.DuokaError], capsys: pytest.CaptureFixture[str]
) -> None:
    code = report(cls("[bold] is not a size", hint="write 24GiB"), debug=False)
    assert code == cls.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: [bold] is not a size\nhint: write 24GiB\n"


def test_debug_shows_the_traceback_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(raised(errors.FleetError("no such GPU")), debug=True) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: no such GPU\n")


def test_a_defect_has_a_traceback_and_asks_for_a_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(raised(ZeroDivisionError("oops")), debug=False) == DEFECT
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err
    assert "report" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, debug=False) == INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"


def test_a_full_gpu_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(torch.OutOfMemoryError("CUDA out of memory."), debug=False) == 12
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "smaller budget" in err


def test_codes_are_distinct() -> None:
    codes = [cls.exit_code for cls in classes()] + [
        DEFECT,
        HUNG_UP,
        INTERRUPTED,
        TERMINATED,
        BROKEN_PIPE,
    ]
    assert len(set(codes)) == len(codes)
