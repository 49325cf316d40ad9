"""The board: an actor beside the server, where replicas tell how they are."""

from __future__ import annotations

import time
from dataclasses import dataclass

from duoka.serve.messages import Ready, Status

_FRESH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a replica is: of which application, and on which of Ray's nodes."""

    application: str
    node_id: str
    ready: Ready
    status: Status | None


class Board:
    """Keeps the last report of each replica for some seconds."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Report]] = {}

    def put(self, replica: str, report: Report) -> None:
        """Take the report of a replica."""
        self._reports[replica] = time.monotonic(), report

    def read(self) -> dict[str, Report]:
        """The reports of the replicas that are there."""
        oldest = time.monotonic() - _FRESH_SECONDS
        self._reports = {name: pair for name, pair in self._reports.items() if pair[0] > oldest}
        return {name: report for name, (_, report) in self._reports.items()}
