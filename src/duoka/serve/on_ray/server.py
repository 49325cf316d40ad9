"""The server on a Ray cluster: deploys replicas behind Ray Serve's own HTTP proxy."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from duoka.errors import MachineError, UsageError
from duoka.serve.address import format_url

from .nodes import ClusterPlan
from .replica import Anchor, Replica, ReplicaSettings

# Concurrent short requests of a replica, such as /health, in addition to generations.
_MORE_REQUESTS = 16


def serve_on_ray(
    cluster: ClusterPlan,
    bounds: tuple[int, int],
    settings: ReplicaSettings,
    *,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model with replicas on the connected cluster, until a signal raises an exception.

    Parameters
    ----------
    cluster : ClusterPlan
    bounds : tuple of int
        The smallest and the largest number of replicas.
    settings : ReplicaSettings
        Their address is that of Ray Serve's proxy, on the head node of the cluster.
    on_ready : callable
        Called with the URL when the smallest number of replicas is ready.

    Raises
    ------
    UsageError
        If the address isn't available, or the cluster already serves an application.
    MachineError
        If the replicas can't be started.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    address = settings.address
    with address.bind() as bound:
        port = bound.getsockname()[1]
    if running := serve.status().applications:
        hint = "stop it with `serve shutdown -y`"
        raise UsageError(f"the cluster already serves {min(running)}", hint=hint)
    serve.shutdown()  # a running proxy may have another address
    serve.start(proxy_location="HeadOnly", http_options={"host": address.host, "port": port})
    name = "duoka-" + re.sub(r"[^\w.-]", "-", settings.names[0])
    try:
        this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        anchor = ray.remote(Anchor).options(num_cpus=0, scheduling_strategy=this_node).remote()
        deployment = _deployment(cluster, bounds, settings)
        try:
            serve.run(deployment.bind(settings, anchor), name=name, route_prefix="/")
        except RuntimeError as error:
            message = serve.status().applications[name].message
            raise MachineError(f"{name}: {message[-2000:]}") from error
        on_ready(format_url(address.host, port))
        threading.Event().wait()
    finally:
        with suppress(Exception):  # the cluster may be gone
            serve.delete(name)
            serve.shutdown()
        ray.shutdown()


def _deployment(cluster: ClusterPlan, bounds: tuple[int, int], settings: ReplicaSettings) -> Any:
    """Return the Ray Serve deployment, which scales between the bounds by the running requests."""
    actor: dict[str, Any] = {"num_gpus": cluster.gpus_per_replica}
    if cluster.foreign_ids:  # a node that joins later may hold replicas
        actor["label_selector"] = {"ray.io/node-id": f"!in({','.join(cluster.foreign_ids)})"}
    sequences = min(plan.workload.batch for plan in cluster.plans.values())
    return serve.deployment(serve.ingress()(Replica)).options(
        name="engine",
        ray_actor_options=actor,
        max_ongoing_requests=sequences + settings.max_queue + _MORE_REQUESTS,
        autoscaling_config={
            "min_replicas": bounds[0],
            "max_replicas": bounds[1],
            "target_ongoing_requests": sequences,
            "upscale_delay_s": 10,
            "look_back_period_s": 10,
            "metrics_interval_s": 2,
        },
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=120,
    )
