"""Pictures, and why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.errors import UsageError
from duoka.report import picture


def test_parts_are_as_high_as_they_are_to_be(tmp_path: Path) -> None:
    figure, parts = picture.new_figure([1.0, 3.0])
    assert len(parts) == 2
    assert list(figure.get_size_inches()) == [8.0, 4.0]
    assert picture.save_picture(figure, tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="can't be written: No such file or directory"):
        picture.save_picture(figure, tmp_path / "absent" / "picture")


def test_matplotlib_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.base.requirements.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="plots need matplotlib"):
        picture.new_figure([1.0])


def test_a_page_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'html' is not supported") as refused:
        picture.save_picture(picture.new_figure([1.0])[0], tmp_path / "page.html")
    assert ".png, .svg or .pdf" in (refused.value.hint or "")
    assert not (tmp_path / "page.html").exists()
