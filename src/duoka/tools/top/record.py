"""Snapshots for programs: rows of a CSV file, and metrics for Prometheus."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.errors import UsageError
from duoka.forecast.stage_bytes import KIND_FIELDS

from .snapshot import GpuNow, GpuSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_SIZES = ("total_bytes", "free_bytes", "reserved_bytes", "forecast_bytes", "others_bytes")
_ACTIVITIES = ("utilization", "temperature_celsius", "power_watts")
_NUMBERS = (*_SIZES, "spare_bytes", "seconds_left", *_ACTIVITIES)
COLUMNS = ("time", "gpu", *KIND_FIELDS.values(), "busy_share", *_NUMBERS)


def _numbers(gpu: GpuNow) -> dict[str, float | None]:
    """Return the known numbers of a GPU."""
    return {
        name: getattr(gpu.activity if name in _ACTIVITIES else gpu, name, None) for name in _NUMBERS
    }


@contextmanager
def csv_file(path: Path) -> Iterator[Callable[[GpuSnapshot], None]]:
    """Open a file, and yield a function that appends a row per GPU of a snapshot; see `COLUMNS`."""
    head = ",".join(COLUMNS)
    with path.open("a+", encoding="utf-8", errors="replace", newline="") as file:
        file.seek(0)
        old_head = file.readline(len(head) + 2)
        if old_head and old_head.rstrip("\r\n") != head:
            raise UsageError(f"{path} is no recording of this duoka's", hint="name another file")
        writer = csv.DictWriter(file, COLUMNS)
        if not old_head:
            writer.writeheader()

        def take(snapshot: GpuSnapshot) -> None:
            writer.writerows(_row(snapshot.time, gpu) for gpu in snapshot.gpus)
            file.flush()

        yield take


def _row(moment: str, gpu: GpuNow) -> dict[str, Any]:
    stages = [process.measured for process in gpu.processes]
    sums = {name: sum(getattr(stage, name) for stage in stages) for name in KIND_FIELDS.values()}
    shares = [p.busy_share for p in gpu.processes if p.busy_share is not None]
    busy = max(shares, default=None)
    return {"time": moment, "gpu": gpu.label, **sums, "busy_share": busy, **_numbers(gpu)}


class Exporter:
    """Serves the last snapshot to Prometheus; by default to this machine alone."""

    def __init__(self, address: str) -> None:
        if find_spec("prometheus_client") is None:
            raise UsageError(
                "--prometheus needs prometheus-client, which isn't installed",
                hint='pip install "duoka[serve]"',
            )
        from prometheus_client import CollectorRegistry, start_http_server

        host, _, port = address.rpartition(":")
        self._last: GpuSnapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(
                int(port), host.strip("[]") or "127.0.0.1", registry
            )
        except (OSError, OverflowError, ValueError) as error:
            raise UsageError(
                f"--prometheus {address} can't be had: {getattr(error, 'strerror', None) or error}",
                hint="write :PORT, or HOST:PORT, with a port that is free",
            ) from error

    def take(self, snapshot: GpuSnapshot) -> None:
        """Serve this snapshot from now on."""
        self._last = snapshot

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics, as prometheus-client's collectors do."""
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"duoka:gpu_{name}", text, labels=["gpu", *labels])

        who = "pid", "model", "kind"
        measured = gauge("memory_bytes", "Bytes of a process of duoka by kind.", *who)
        forecast = gauge("memory_forecast_bytes", "The same at its plan's peak.", *who)
        busy = gauge("busy_share", "Share of the last seconds in work.", *who[:2])
        gauges = {name: gauge(name, f"Of the whole GPU: {name}.") for name in _NUMBERS}
        for gpu in () if self._last is None else self._last.gpus:
            for process in gpu.processes:
                label = [gpu.label, str(process.pid), process.model]
                for family, stage in ((measured, process.measured), (forecast, process.forecast)):
                    for kind, size in stage.kinds.items():
                        family.add_metric([*label, kind], size)
                if process.busy_share is not None:
                    busy.add_metric(label, process.busy_share)
            for name, value in _numbers(gpu).items():
                if value is not None:
                    gauges[name].add_metric([gpu.label], value)
        yield from (measured, forecast, busy, *gauges.values())
