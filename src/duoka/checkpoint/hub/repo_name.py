"""Names of repositories: "org/name", "org/name@revision"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from duoka.errors import UsageError

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>.+))?", re.ASCII
)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./+-]{0,200}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository on the Hub ("org/name") at a revision, or one of its files."""

    repo: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        repository = self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"
        return f"{self.file} of {repository}" if self.file else repository


def parse_name(text: str, revision: str | None = None) -> HubName | None:
    """Parse "org/name" or "org/name@revision"; return None for any other text."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    written = match["revision"]
    if None not in (written, revision) and written != revision:
        raise UsageError(
            f"{text!r} includes a revision, and --revision {revision!r} is given as well",
            hint="give only one of them",
        )
    resolved = written or (MAIN if revision is None else revision)
    if not _REVISION.fullmatch(resolved) or ".." in resolved or resolved.endswith("/"):
        raise UsageError(
            f"{resolved!r} can't be a revision", hint="give a branch, a tag or a commit"
        )
    return HubName(repo=match["repo"], revision=resolved)
