"""The process of a part: it writes a line of JSON for each finding.

The argument is a JSON object: the part, the UUIDs of its GPUs, and the options of the part.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from duoka.hardware.fleet import Fleet
    from duoka.runtime import devices
    from duoka.tools.doctor import Finding, examine

    from .kernels import check_attention, check_graphs, measure_bandwidth
    from .workloads import measure_engine, measure_tuning
from duoka.base.serialization import to_dict

_KERNELS = (check_attention, check_graphs, measure_bandwidth)
_WORKLOADS: Mapping[str, Callable[..., Iterable[Finding]]] = {
    "engine": measure_engine,
    "tune": measure_tuning,
}


def main() -> None:
    """Run the part that the first argument describes."""
    logging.getLogger("duoka").addHandler(_WarningsAsFindings(logging.WARNING))
    request = json.loads(sys.argv[1])
    for check in _checks(request.pop("part"), request.pop("gpus"), request):
        for finding in examine("", "", check).findings:
            _write_line(finding)


class _WarningsAsFindings(logging.Handler):
    """Writes warnings of duoka: a fast path is not used, or a copy is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record as an error."""
        _write_line(Finding("error", record.getMessage()))


def _write_line(finding: Finding) -> None:
    sys.stdout.write(json.dumps(to_dict(finding)) + "\n")
    sys.stdout.flush()


def _checks(
    part: str, uuids: str, options: dict[str, Any]
) -> Iterator[Callable[[], Iterable[Finding]]]:
    """Yield the checks of a part."""
    fleet = Fleet.detect(uuids)
    devices.materialise(fleet)
    if part == "kernels":
        yield from (partial(check, device) for device in fleet.devices for check in _KERNELS)
    else:
        yield partial(_WORKLOADS[part], fleet, **options)
