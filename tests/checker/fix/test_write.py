"""Patched files, as copies and in place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from duoka.checker.fix import Patch, apply, apply_in_place
from duoka.checker.fix.patch import unified_diff
from duoka.errors import MachineError, UsageError


def patch_of(path: Path, before: str = "a\r\nb\n", after: str = "a\r\nc\n") -> Patch:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(before.encode())
    diff = unified_diff(str(path), before, after)
    return Patch(file=str(path), before=before, after=after, diff=diff)


def test_copies_keep_their_paths_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = patch_of(tmp_path / "models" / "a.py")
    [target] = apply([patch])
    assert target == Path("duoka-fixed/models/a.py")
    assert target.read_bytes() == b"a\r\nc\n"
    assert Path(patch.file).read_bytes() == b"a\r\nb\n"


def test_copies_of_files_elsewhere_keep_what_tells_them_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "one" / "a.py", tmp_path / "x" / "two" / "a.py"]
    out = tmp_path / "out"
    assert apply([patch_of(paths[0])], out) == (out / "one" / "a.py",)
    both = apply([patch_of(path) for path in paths], out)
    assert both == (out / "one" / "a.py", out / "two" / "a.py")
    deep = [tmp_path / "x" / "one" / "m" / "a.py", tmp_path / "x" / "two" / "m" / "a.py"]
    both = apply([patch_of(path) for path in deep], out)
    assert both == (out / "one" / "m" / "a.py", out / "two" / "m" / "a.py")


def test_copies_of_packages_keep_the_package(tmp_path: Path) -> None:
    path = tmp_path / "lib" / "site-packages" / "pack" / "models" / "a.py"
    [target] = apply([patch_of(path)], tmp_path / "out")
    assert target == tmp_path / "out" / "pack" / "models" / "a.py"


def test_a_copy_never_takes_the_place_of_its_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = patch_of(tmp_path / "a.py")
    with pytest.raises(UsageError, match="would overwrite it"):
        apply([patch], tmp_path)
    assert (tmp_path / "a.py").read_bytes() == b"a\r\nb\n"


def test_in_place(tmp_path: Path) -> None:
    patch = patch_of(tmp_path / "a.py")
    (tmp_path / "a.py").chmod(0o640)
    assert apply_in_place([patch]) == (tmp_path / "a.py",)
    assert (tmp_path / "a.py").read_bytes() == b"a\r\nc\n"
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    patch = patch_of(tmp_path / "real" / "a.py")
    link = tmp_path / "a.py"
    link.symlink_to(tmp_path / "real" / "a.py")
    apply_in_place([Patch(file=str(link), before=patch.before, after=patch.after, diff="")])
    assert link.is_symlink()
    assert link.read_bytes() == b"a\r\nc\n"


def test_nothing_is_written_when_one_file_has_changed(tmp_path: Path) -> None:
    patches = [patch_of(tmp_path / "a.py"), patch_of(tmp_path / "b.py")]
    (tmp_path / "b.py").write_text("other")
    with pytest.raises(UsageError, match=r"b.py has changed since it was checked"):
        apply_in_place(patches)
    assert (tmp_path / "a.py").read_bytes() == b"a\r\nb\n"
    (tmp_path / "b.py").unlink()
    with pytest.raises(UsageError, match="has changed"):
        apply_in_place(patches)


def test_installed_packages_are_not_written_over(tmp_path: Path) -> None:
    patch = patch_of(tmp_path / "site-packages" / "pack" / "a.py")
    with pytest.raises(UsageError, match="installed package"):
        apply_in_place([patch])


def test_a_directory_that_cant_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(MachineError, match="can't be written"):
        apply([patch_of(tmp_path / "m" / "a.py")], tmp_path / "out")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\r\nb\r\n", "a\r\nB\r\n"),
        ("a\nb", "a\nB"),
        ("a\nb", "A\nb"),
        ("a\n\x0cb\u2028x\n", "a\n\x0cB\u2028x\n"),
    ],
)
def test_git_reads_the_diff(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = patch_of(tmp_path / "m" / "a.py", before, after)
    (tmp_path / "x.diff").write_bytes(patch.diff.encode())
    subprocess.run(["git", "apply", "x.diff"], check=True, cwd=tmp_path)
    assert Path(patch.file).read_bytes() == after.encode()
