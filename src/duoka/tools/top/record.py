"""Snapshots for programs: rows of a file, and what Prometheus reads."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from duoka.base.files import why
from duoka.errors import UsageError
from duoka.report.terminal.plan import kinds_of

from .snapshot import GpuNow, Snapshot

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

KIND_COLUMNS = {
    "weights": "weight_bytes",
    "KV cache": "kv_cache_bytes",
    "activations": "activation_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "overhead": "overhead_bytes",
}
_ACTIVITIES = (
    "utilization",
    "temperature_celsius",
    "power_watts",
    "pcie_received_bytes_per_second",
    "pcie_sent_bytes_per_second",
    "nvlink_received_bytes_per_second",
    "nvlink_sent_bytes_per_second",
)
_SIZES = ("total_bytes", "free_bytes", "others_bytes", "reserved_bytes", "forecast_bytes")
COLUMNS = ("time", "gpu", "pids", *KIND_COLUMNS.values(), *_SIZES, "spare_bytes", "busy_share")
COLUMNS += ("seconds_left", *_ACTIVITIES)


class CsvFile:
    """Appends a row for each GPU of a snapshot; see `COLUMNS`.

    Raises
    ------
    UsageError
        If the file can't be written, or begins otherwise.
    """

    def __init__(self, path: Path) -> None:
        head = ",".join(COLUMNS)
        try:
            self._file: TextIO = path.open("a+", encoding="utf-8", newline="")
            self._file.seek(0)
            first = self._file.readline(len(head) + 2)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} can't be written: {why(error)}",
                hint="name a file in a directory that is there and that you may write to",
            ) from error
        if first and first.rstrip("\r\n") != head:
            self._file.close()
            raise UsageError(f"{path} is no recording of this duoka's", hint="name another file")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        if not first:
            self._writer.writeheader()

    def write(self, snapshot: Snapshot) -> None:
        """Append the rows of a snapshot, which are in the file afterwards."""
        self._writer.writerows(_row(snapshot.time, gpu) for gpu in snapshot.gpus)
        self._file.flush()

    def close(self) -> None:
        """End."""
        self._file.close()


def _row(moment: str, gpu: GpuNow) -> dict[str, Any]:
    shares = [holder.busy_share for holder in gpu.holders if holder.busy_share is not None]
    return {
        "time": moment,
        "gpu": gpu.name,
        "pids": " ".join(str(holder.pid) for holder in gpu.holders),
        **{column: gpu.kinds[kind] for kind, column in KIND_COLUMNS.items()},
        **{name: getattr(gpu, name) for name in (*_SIZES, "spare_bytes", "seconds_left")},
        "busy_share": max(shares, default=None),
        **{name: getattr(gpu.activity, name, None) for name in _ACTIVITIES},
    }


class Exporter:
    """Answers Prometheus with the last snapshot.

    Parameters
    ----------
    address : str
        ``HOST:PORT``; without a host this machine alone reaches it.

    Raises
    ------
    UsageError
        If the address can't be had, or prometheus-client isn't installed.
    """

    def __init__(self, address: str) -> None:
        if find_spec("prometheus_client") is None:
            raise UsageError(
                "--prometheus needs prometheus-client, which isn't installed",
                hint='pip install "duoka[serve]"',
            )
        from prometheus_client import CollectorRegistry, start_http_server

        host, _, port = address.rpartition(":")
        self.last: Snapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(
                int(port), host.strip("[]") or "127.0.0.1", registry
            )
        except (OSError, OverflowError, ValueError) as error:
            raise UsageError(
                f"--prometheus {address} can't be had: {why(_plain(error))}",
                hint="write :PORT, or HOST:PORT, with a port that is free",
            ) from error

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus-client."""
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"duoka:gpu_{name}", text, labels=["gpu", *labels])

        who = "pid", "model", "kind"
        measured = gauge("memory_bytes", "Bytes of a process of duoka by kind.", *who)
        forecast = gauge("forecast_bytes", "The same at the peak, as its plan forecasts.", *who)
        busy = gauge("busy_share", "Share of the last seconds in work.", "pid", "model")
        names = (*_SIZES[:3], "spare_bytes", "seconds_left")
        gauges = {name: gauge(name, f"See `duoka top`: {name}.") for name in names}
        gauges |= {name: gauge(name, f"As the driver tells: {name}.") for name in _ACTIVITIES}
        for gpu in () if self.last is None else self.last.gpus:
            for holder in gpu.holders:
                label = [gpu.name, str(holder.pid), holder.model]
                for family, stage in ((measured, holder.measured), (forecast, holder.forecast)):
                    for kind, size in kinds_of(stage):
                        family.add_metric([*label, kind], size)
                if holder.busy_share is not None:
                    busy.add_metric(label, holder.busy_share)
            for name, family in gauges.items():
                value = getattr(gpu.activity if name in _ACTIVITIES else gpu, name, None)
                if value is not None:
                    pids = "" if gpu.activity else f" (pid {gpu.holders[0].pid})"
                    family.add_metric([f"{gpu.name}{pids}"], value)
        yield from (measured, forecast, busy, *gauges.values())


def _plain(error: Exception) -> OSError | ValueError:
    return error if isinstance(error, (OSError, ValueError)) else ValueError(str(error))
