"""Prometheus metrics: with vLLM's names, so that its dashboards work, and some of duoka's own.

Source of names and buckets: vLLM 0.33, ``v1/metrics/loggers.py``.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .messages import Begun, Delta, Ended, Event
from .pool import EnginePool

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LATELY_SECONDS = 5.0
# vLLM's names of the reasons why a generation ended.
_REASONS = {"cancelled": "abort", "tool_calls": "stop"}


class Metrics:
    """The metrics of the server: counts since its start, and the state of the engines."""

    def __init__(self, pool: EnginePool, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(pool, model))
        self._model = model
        self._recent_counts: deque[tuple[float, int]] = deque(maxlen=100_000)

        def histogram(name: str, text: str) -> Any:
            options: Any = {"buckets": _SECONDS, "registry": self.registry}
            return Histogram(f"vllm:{name}", text, ["model_name"], **options).labels(model)

        def counter(name: str, text: str, *labels: str) -> Any:
            family = Counter(name, text, ["model_name", *labels], registry=self.registry)
            return family if labels else family.labels(model)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self.success = counter("vllm:request_success", "Finished requests.", "finished_reason")
        queries = "Prompt tokens looked up in the prefix cache."
        self.queries = counter("vllm:prefix_cache_queries", queries)
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.failures = counter("duoka:request_failures", "Failed requests.", "status")
        self.first_token = histogram("time_to_first_token_seconds", "Time to first token.")
        self.between = histogram("inter_token_latency_seconds", "Time between output tokens.")
        self.whole = histogram("e2e_request_latency_seconds", "Total request time.")
        self.prefill = histogram("request_prefill_time_seconds", "Time in prefill.")
        self.decode = histogram("request_decode_time_seconds", "Time in decode.")

    @property
    def tokens_per_second(self) -> float:
        """The generated tokens per second, averaged over the last five seconds."""
        now = time.monotonic()
        while self._recent_counts and self._recent_counts[0][0] < now - _LATELY_SECONDS:
            self._recent_counts.popleft()
        return sum(number for _, number in self._recent_counts) / _LATELY_SECONDS

    def came(self, now: float, number: int) -> None:
        """Record that `number` tokens arrived at time `now`."""
        self._recent_counts.append((now, number))

    def failed(self, status: int) -> None:
        """Count a failed request."""
        self.failures.labels(self._model, str(status)).inc()

    def watch(self) -> RequestMetrics:
        """Return a recorder for the events of a new request."""
        return RequestMetrics(self, self._model)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Records the events of one request in the metrics."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._begin = self._last_delta_at = time.monotonic()
        self._first_token_at: float | None = None
        self._streamed_tokens = Counts[int]()  # by choice

    def take(self, event: Event) -> None:
        """Record an event."""
        metrics, now = self._metrics, time.monotonic()
        if isinstance(event, Begun):
            metrics.prompt_tokens.inc(event.prompt_tokens)
            metrics.queries.inc(event.prompt_tokens)
        elif isinstance(event, Delta):
            if self._first_token_at is None:
                self._first_token_at = now
                metrics.first_token.observe(now - self._begin)
                metrics.prefill.observe(now - self._begin)
            else:
                metrics.between.observe(now - self._last_delta_at)
            self._last_delta_at = now
            metrics.came(now, event.num_tokens)
            metrics.generation_tokens.inc(event.num_tokens)
            self._streamed_tokens[event.choice] += event.num_tokens
        elif isinstance(event, Ended):
            # The last tokens may have no text, and so no `Delta`.
            remaining = event.new_tokens - self._streamed_tokens[event.choice]
            metrics.generation_tokens.inc(max(0, remaining))
            metrics.success.labels(self._model, _REASONS.get(event.finish, event.finish)).inc()
            if event.choice == 0:  # the choices of a request share one prompt
                metrics.hits.inc(event.shared_tokens)
            metrics.whole.observe(now - self._begin)
            if self._first_token_at is not None:
                metrics.decode.observe(now - self._first_token_at)


class _EngineCollector(Collector):
    """Collects the state of the engines at each scrape."""

    def __init__(self, pool: EnginePool, model: str) -> None:
        self._pool, self._model = pool, model

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all engines; see prometheus-client."""

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=["model_name", "engine", *labels])

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(name, text, labels=["model_name", "engine", *labels])

        running = gauge("vllm:num_requests_running", "Running requests.")
        waiting = gauge("vllm:num_requests_waiting", "Queued requests.")
        usage = gauge("vllm:kv_cache_usage_perc", "Fraction of KV cache pages in use.")
        up = gauge("duoka:engine_up", "1 if the engine is running.")
        reserved = gauge("duoka:reserved_bytes", "Reserved memory in bytes.", "device")
        forecast = gauge("duoka:forecast_bytes", "Forecast memory in bytes.", "device")
        preempted = counter("vllm:num_preemptions", "Preemptions.")
        deaths = counter("duoka:engine_deaths", "Engine failures.")
        busy = counter("duoka:stage_busy_seconds", "Busy seconds by device.", "device")
        fallbacks = gauge("duoka:fallback", "Unused features.", "device", "unused", "reason")
        share = gauge("duoka:busy_share", "Fraction of recent time busy.", "device")
        for engine in self._pool.engines:
            at = [self._model, str(engine.replica)]
            up.add_metric(at, float(engine.state == "ready"))
            deaths.add_metric(at, engine.num_deaths)
            for stage in engine.settings.plan.forecast.devices:
                forecast.add_metric([*at, stage.device], stage.reserved_bytes)
            status = engine.status
            if status is None:
                continue
            running.add_metric(at, status.running)
            waiting.add_metric(at, status.waiting)
            usage.add_metric(at, 1 - status.free_pages / max(1, status.pages))
            preempted.add_metric(at, status.preemptions)
            for device, part in status.busy_shares.items():
                share.add_metric([*at, device], part)
            for device, number in status.reserved_bytes.items():
                reserved.add_metric([*at, device], number)
            for device, seconds in status.busy_seconds.items():
                busy.add_metric([*at, device], seconds)
            for fallback in status.fallbacks:
                fallbacks.add_metric([*at, *fallback], 1.0)
        yield from (running, waiting, usage, up, reserved, forecast)
        yield from (share, preempted, deaths, busy, fallbacks)
