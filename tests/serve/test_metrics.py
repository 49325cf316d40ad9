"""What Prometheus reads, under the names that vLLM's dashboards look for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from abuse import CHAT, exchange, message, message_of
from prometheus_client.parser import text_string_to_metric_families
from served import Served

from duoka.report.measured import Fallback
from duoka.serve.messages import Delta, Ended, Event, Status
from duoka.serve.metrics import Metrics

# Of vLLM 0.33's documentation, "Production Metrics"; counters end in _total as they are read.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def read(served: Served) -> tuple[dict[str, str], dict[str, float]]:
    """The kinds of all metrics, and the sums of their samples."""
    code, answer = asyncio.run(exchange(served.url, message("/metrics", b"", method="GET")))
    assert code == 200
    kinds, values = {}, dict[str, float]()
    for family in text_string_to_metric_families(answer.partition(b"\r\n\r\n")[2].decode()):
        if family.name.endswith("_created"):  # prometheus-client's own
            continue
        kinds[family.name] = family.type
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0) + sample.value
    return kinds, values


def test_names_are_vllms_or_begin_with_ours(served: Served) -> None:
    asyncio.run(exchange(served.url, message_of(CHAT, {})))
    kinds, values = read(served)
    assert {name: kind for name, kind in kinds.items() if name.startswith("vllm:")} == VLLM
    assert all(name.startswith(("vllm:", "duoka:")) for name in kinds)
    assert values["duoka:engine_up"] == 1
    assert values["duoka:reserved_bytes"] <= values["duoka:forecast_bytes"]


def test_what_was_answered_is_counted(served: Served) -> None:
    _, before = read(served)
    said = [{"role": "user", "content": "ab"}]
    body = {"messages": said, "max_tokens": 3, "n": 2, "logit_bias": {"256": -100}}
    assert asyncio.run(exchange(served.url, message_of(CHAT, body)))[0] == 200
    _, after = read(served)
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    assert added["vllm:generation_tokens_total"] == 6
    assert added["vllm:request_success_total"] == 2
    assert added["vllm:prompt_tokens_total"] == added["vllm:prefix_cache_queries_total"] == 5
    assert added["vllm:time_to_first_token_seconds_count"] == 1


def test_tokens_are_counted_as_they_come() -> None:
    pool: Any = SimpleNamespace(engines=[])
    metrics = Metrics(pool, "glm")
    request = metrics.watch()

    def tokens_after(event: Event) -> float | None:
        request.take(event)
        name = "vllm:generation_tokens_total"
        return metrics.registry.get_sample_value(name, {"model_name": "glm"})

    assert tokens_after(Delta(number=0, choice=0, text="a", num_tokens=2)) == 2
    assert tokens_after(Delta(number=0, choice=1, text="b", num_tokens=1)) == 3
    end: Any = {"number": 0, "finish": "length", "shared_tokens": 0}
    assert tokens_after(Ended(**end, choice=0, new_tokens=3)) == 4
    assert tokens_after(Ended(**end, choice=1, new_tokens=1)) == 4


def test_what_a_device_does_not_use_is_told_with_the_reason() -> None:
    fallback = Fallback("cuda:0", "graphs", 'results differ by "3.1%"')
    status = Status(running=0, waiting=0, pages=4, free_pages=4, fallbacks=[fallback])
    plan = SimpleNamespace(forecast=SimpleNamespace(devices=()))
    engine: Any = SimpleNamespace(
        replica=0, state="ready", num_deaths=0, status=status, settings=SimpleNamespace(plan=plan)
    )
    pool: Any = SimpleNamespace(engines=[engine])
    families = text_string_to_metric_families(Metrics(pool, "glm").text().decode())
    (sample,) = (s for family in families for s in family.samples if s.name == "duoka:fallback")
    expected = {"model_name": "glm", "engine": "0", **fallback._asdict()}
    assert (sample.labels, sample.value) == (expected, 1)
