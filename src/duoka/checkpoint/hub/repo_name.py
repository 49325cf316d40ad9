"""Names of repositories: "org/name", "org/name@revision", "modelscope:org/name"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from duoka.errors import UsageError

MODELSCOPE = "modelscope:"
"""Prefix of the name of a repository on ModelScope."""

_NAME = re.compile(
    rf"(?P<site>{MODELSCOPE})?(?P<repo>[A-Za-z0-9][\w.-]{{0,95}}/[A-Za-z0-9][\w.-]{{0,95}})"
    r"(?:@(?P<revision>.+))?",
    re.ASCII,
)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./+-]{0,200}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
_DEFAULT_REVISIONS = {"": MAIN, MODELSCOPE: "master"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository on the Hub ("org/name") at a revision, or one of its files.

    `site` is "" for the Hub, and `MODELSCOPE` for ModelScope.
    """

    repo: str
    revision: str = MAIN
    file: str = ""
    site: str = ""

    @property
    def is_default(self) -> bool:
        """True for the revision of a name without one."""
        return self.revision == _DEFAULT_REVISIONS[self.site]

    def __str__(self) -> str:
        repository = f"{self.site}{self.repo}" + ("" if self.is_default else f"@{self.revision}")
        return f"{self.file} of {repository}" if self.file else repository


def parse_name(text: str, revision: str | None = None) -> HubName | None:
    """Parse a name with an optional site and revision; return None for any other text."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    written = match["revision"]
    if None not in (written, revision) and written != revision:
        raise UsageError(
            f"{text!r} includes a revision, and --revision {revision!r} is given as well",
            hint="give only one of them",
        )
    site = match["site"] or ""
    resolved = written or (_DEFAULT_REVISIONS[site] if revision is None else revision)
    if not _REVISION.fullmatch(resolved) or ".." in resolved or resolved.endswith("/"):
        raise UsageError(
            f"{resolved!r} can't be a revision", hint="give a branch, a tag or a commit"
        )
    return HubName(repo=match["repo"], revision=resolved, site=site)
