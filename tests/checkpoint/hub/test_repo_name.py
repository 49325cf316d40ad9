from __future__ import annotations

import pytest

from duoka.checkpoint.hub import HubName, parse_name
from duoka.errors import UsageError

from .conftest import NAME

# ── names ──


@pytest.mark.parametrize(
    ("text", "revision", "name"),
    [
        ("org/model", None, HubName(repo="org/model")),
        ("org/model", "v1.0", HubName(repo="org/model", revision="v1.0")),
        ("org/model@refs/pr/3", None, HubName(repo="org/model", revision="refs/pr/3")),
        ("THUDM/chatglm3-6b-128k@main", "main", HubName(repo="THUDM/chatglm3-6b-128k")),
        ("model", None, None),
        ("./org/model", None, None),
        ("/org/model", None, None),
        ("org/model/more", None, None),
        ("../model", None, None),
        ("org/..", None, None),
        ("org/mo del", None, None),
    ],
)
def test_names(text: str, revision: str | None, name: HubName | None) -> None:
    assert parse_name(text, revision) == name


@pytest.mark.parametrize("revision", ["../../etc", "a b", "-x", "", "a/", "x" * 300, "a\0"])
def test_what_is_no_revision(revision: str) -> None:
    with pytest.raises(UsageError, match="can't be a revision"):
        parse_name(NAME, revision)


def test_two_revisions() -> None:
    with pytest.raises(UsageError, match="includes a revision, and --revision 'v2' is given"):
        parse_name("org/model@v1", "v2")
