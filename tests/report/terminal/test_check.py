"""A printed report tells everything, at any width, with and without Unicode."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from reports import bad_report, good_report, loss_fault, table_fault, write_model
from rich.cells import cell_len
from rich.console import Console, RenderableType

from duoka.report.check_report import CheckReport, Fault
from duoka.report.terminal import render_plain, render_report


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # paths are shown from here on


def printed(what: RenderableType, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="replace"), width=width)
    console.print(what)
    console.file.flush()
    return raw.getvalue().decode(encoding)


def report_of(*faults: Fault) -> CheckReport:
    return CheckReport(model="Tiny", devices=("cuda:0", "cuda:1"), faults=faults)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 72, 80, 200])
def test_everything_is_there_at_any_width(width: int, tmp_path: Path) -> None:
    text = printed(render_report(bad_report(tmp_path)), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "\x1b" not in text
    told = words(text)
    for wanted in (
        "✗ TinyForCausalLM on cuda:0 and cuda:1: the map is incomplete",
        "2 faults",
        "cuda:1 exceeds its budget by 1.00 GiB",
        "1 warning",
        "encoder.layers.0-27.weight",
        "transformer.word_embeddings → ",
        "--save-device-map",
        "TypeError: 'NoneType' object is not subscriptable",
        "fault 1 of 2:",
        "modeling_tiny.py:11",
        "in Encoder.forward",
        "14 tensors of caches",
        "8.00 MiB each",
        "80 times",
        "40 modules:",
        "13.00",
        "Tensor.item, 3 times",
        "2 hops",
        "note: encoder.fast is compiled; it ran eagerly",
        "--fix",
    ):
        assert wanted in told, wanted


def test_the_first_line_is_the_verdict(tmp_path: Path) -> None:
    first = printed(render_report(good_report(tmp_path)), 100).splitlines()[0]
    assert first == "✓ TinyForCausalLM on cuda:0 and cuda:1: runs without a fault, memory fits"
    trained = replace(good_report(tmp_path), train=True, memory=())
    first = printed(render_report(trained), 100).splitlines()[0]
    assert first == "✓ TinyForCausalLM on cuda:0 and cuda:1: runs and trains without a fault"


def test_it_is_short_when_all_is_well(tmp_path: Path) -> None:
    assert len(render_plain(render_report(good_report(tmp_path)), 80).splitlines()) <= 12


def test_without_unicode(tmp_path: Path) -> None:
    text = printed(render_report(report_of(table_fault(write_model(tmp_path)))), 80, "ascii")
    assert text.startswith("fails: Tiny on")
    assert " 12 | return h + self.table, presents" in text
    assert "    |        ^---^^^^^^^^^^" in "\n".join(line.rstrip() for line in text.splitlines())


def test_arrows_stand_under_their_expressions(tmp_path: Path) -> None:
    text = render_plain(render_report(report_of(loss_fault(write_model(tmp_path)))), 160)
    lines = text.splitlines()
    code = next(index for index, line in enumerate(lines) if "loss = {" in line)
    under = lines[code + 1]
    wide = lines[code].index("损失")
    for expression, device in (
        ("logits.view(-1, self.config.vocabulary)", "cuda:1"),
        ("labels.view(-1)", "cuda:0"),
    ):
        # Two wide characters stand before: two cells more than characters.
        start = lines[code].index(expression) + 2
        assert start > wide
        assert under[start : start + len(expression)] == "^" * len(expression)
        assert under[start - 1] == "─"
        assert any(line[start : start + 6] == device for line in lines[code + 2 : code + 4])


def test_a_line_that_is_too_long_shows_what_is_marked(tmp_path: Path) -> None:
    text = render_plain(render_report(report_of(loss_fault(write_model(tmp_path)))), 80)
    line = next(line for line in text.splitlines() if "cross_entropy(logits" in line)
    assert line.split(" │ ")[1].strip().startswith('loss = {"损失": torch.nn'), (
        "minimize the total time of a"
    )
    assert line.endswith("…")
    assert "labels.view(-1) on cuda:0, moved to cuda:1" in text


def test_followups_are_told_under_their_fault(tmp_path: Path) -> None:
    text = words(render_plain(render_report(bad_report(tmp_path))))
    assert "causes torch.nn.functional.cross_entropy of tensors on cuda:1 and cuda:0 at" in text


def test_the_middle_of_a_long_path_is_left_out(tmp_path: Path) -> None:
    text = render_plain(render_report(report_of(table_fault(write_model(tmp_path)))))
    assert "encoder.blocks.0 " in text
    assert "… 5 more" in text
    assert "encoder.blocks.11 " in text


def test_what_a_file_says_is_no_markup(tmp_path: Path) -> None:
    fault = replace(table_fault(write_model(tmp_path)), message="[red]no[/red] [/]")
    assert "[red]no[/red] [/]" in render_plain(render_report(report_of(fault)))


def test_a_report_with_next_to_nothing_is_printed() -> None:
    empty = CheckReport(model="m", devices=())
    assert render_plain(render_report(empty)) == "✓ m: runs without a fault\n"


def test_one_device_says_little(tmp_path: Path) -> None:
    one = replace(good_report(tmp_path), devices=("cuda:0",))
    assert "note: a single device can't have device faults" in render_plain(render_report(one))
    assert "note:" not in render_plain(render_report(good_report(tmp_path)))
