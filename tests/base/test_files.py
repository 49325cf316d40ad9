from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from duoka.base.files import read_text, whole_directory, write_whole


def test_text_survives_a_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "多卡\n")
    assert read_text(tmp_path / "file", most_bytes=7) == "多卡\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "half \ud800")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", "old")

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("pipe", "binary"):
        with pytest.raises(ValueError, match=r"regular|decode"):
            read_text(tmp_path / name, most_bytes=100)
    with pytest.raises(ValueError, match="more than 1 bytes"):
        read_text(tmp_path / "binary", most_bytes=1)
    with pytest.raises(OSError, match="No such file"):
        read_text(tmp_path / "nothing", most_bytes=1)
    with pytest.raises(OSError, match="directory"):
        read_text(tmp_path, most_bytes=1)


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "old")
    file.chmod(0o600)
    write_whole(file, "new")
    assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o600, "new")


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "old"


def test_nothing_takes_the_place_of_a_pipe_or_a_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")  # as /dev/stdout is
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="it is not a regular file"):
            write_whole(tmp_path / name, "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_directory_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            read_text(tmp_path, most_bytes=1)
    assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/sys/new"])
def test_places_of_the_system_stay_as_they_are(name: str) -> None:
    with pytest.raises(OSError, match="to the operating system"):
        write_whole(Path(name), "text")


def test_a_directory_is_there_when_it_is_filled(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    with whole_directory(place) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("text")
        assert not place.exists()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "new",
        "new/place",
        "new/place/inner",
        "new/place/inner/file",
    ]


def test_a_directory_that_is_not_filled_is_not_there(tmp_path: Path) -> None:
    def fill() -> None:
        with whole_directory(tmp_path / "place") as partial:
            (partial / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_filled_and_another_is_left_alone(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").write_text("theirs")
    with whole_directory(tmp_path / "empty") as partial:
        (partial / "file").write_text("ours")
    with pytest.raises(OSError, match="not empty"), whole_directory(tmp_path / "full") as partial:
        (partial / "file").write_text("ours")
    assert [(tmp_path / name / "file").read_text() for name in ("empty", "full")] == [
        "ours",
        "theirs",
    ]
    assert len(list(tmp_path.iterdir())) == 2
