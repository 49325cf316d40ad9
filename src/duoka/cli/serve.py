"""``duoka serve``: serve a model over HTTP with an OpenAI-compatible API."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import duoka
from duoka.api.plan import plan_copies, plan_request
from duoka.base.files import reading
from duoka.base.requirements import require_package
from duoka.base.text import choose
from duoka.base.units import format_count
from duoka.errors import UsageError

from . import planning, replicas
from .groups import OptionGroup, all_but, flag, option, with_groups
from .options import ModelOptions, PlanOptions
from .terminal import note, stdout, working

if TYPE_CHECKING:
    from duoka.serve.address import Address
    from duoka.serve.messages import EngineSettings
    from duoka.serve.service import Service

_KEY_VARIABLE = "DUOKA_API_KEY"
_LEAST_KEY_CHARACTERS = 8
_CLUSTERS = ("ray",)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_REASONING = ("on", "off", "auto")
_PORT, _MAX_QUEUE = 8000, 256
# Default number of concurrent requests, with a paged KV cache and with fixed batches.
_MAX_REQUESTS, _BATCH = 16, 4
_PlanToServe = Annotated[PlanOptions, all_but(PlanOptions, "max_context", "max_batch", "serve")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(OptionGroup):
    """Options of the server: its address and its clients."""

    host: str | None = option(
        "ADDRESS", "Address to listen on. By default 127.0.0.1, reachable from this machine only."
    )
    port: int | None = option(
        "PORT", "Port to listen on; 0 for any free port. By default 8000.", min=0, max=65535
    )
    name: list[str] | None = option(
        "NAME", "Model name in the API; repeatable. By default the name of its directory."
    )
    api_key_file: Path | None = option(
        "FILE", f"A file with the API key that clients must send; or set {_KEY_VARIABLE}."
    )
    insecure: bool = flag("Accept requests without an API key on a public address.")
    max_queue: int | None = option(
        "N", "Maximum number of queued requests; more are refused with 429. By default 256.", min=0
    )
    allow_image_urls: bool = flag("Download images that requests reference by URL.")
    cors: list[str] | None = option(
        "ORIGIN",
        "Origin of web pages that may use the API, such as https://example.org; * for all. "
        "Repeatable.",
    )
    log_requests: bool = flag("Log a line per request, without its prompt, and engine events.")
    reasoning: str | None = option(
        "CHOICE",
        "Reasoning where a request doesn't choose: on, off, or auto (the model's chat template "
        "decides, the default).",
        values=_REASONING,
    )
    cluster: str | None = option(
        "CLUSTER",
        "ray: run on the nodes of a Ray cluster; --replicas may then be a range such as 2-6.",
        names=("--on",),
        values=_CLUSTERS,
    )

    def address(self) -> Address:
        """Return the address to listen on; UsageError for a public address without an API key."""
        from duoka.serve.address import Address

        port, origins = _PORT if self.port is None else self.port, tuple(self.cors or ())
        host, key = self.host or "127.0.0.1", self._key()
        address = Address(host=host, port=port, key=key, origins=origins)
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                text = f"--cors {origin!r} is not an origin, SCHEME://HOST[:PORT] in lower case"
                raise UsageError(text, hint="--cors https://example.org, or --cors '*' for all")
        if not address.is_local and address.key is None and not self.insecure:
            text = f"{host} is reachable from other machines, and no API key is given"
            hint = "use --api-key-file FILE, or --insecure to accept every client"
            raise UsageError(text, hint=hint)
        return address

    def _key(self) -> str | None:
        """Read the API key from its file or the environment; None if no key is given."""
        key = os.environ.get(_KEY_VARIABLE)
        if self.api_key_file is not None:
            hint = "give a text file that contains only the key"
            with reading(f"the key file {self.api_key_file}", hint):
                key = self.api_key_file.read_text(encoding="utf-8").strip()
        if key is not None and (len(key) < _LEAST_KEY_CHARACTERS or not key.isascii()):
            least = f"at least {_LEAST_KEY_CHARACTERS} of ASCII are needed"
            text = f"the API key has {len(key)} characters; {least}"
            raise UsageError(text, hint="head -c 32 /dev/urandom | base64 > key")
        return key


@with_groups
def serve(server: ServeOptions, options: _PlanToServe, model: ModelOptions) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs; it is planned and proved first.

    [bold]duoka serve[/] ./glm-4-9b-chat --gpus 2x24GiB

    [bold]duoka serve[/] ./chatglm3-6b --gpus "virtual:2x8GiB" --context 8K --sequences 32

    [bold]duoka serve[/] ./glm-4-9b-chat --host 0.0.0.0 --api-key-file key --port 8080
    """
    address = server.address()
    if server.reasoning is not None:
        choose("reasoning", server.reasoning, _REASONING)
    if server.cluster is not None:
        choose("cluster", server.cluster, _CLUSTERS)
        require_package("ray", "--on ray needs")
        _serve_on_ray(server, options, model, address)
        return
    from duoka.serve.pool import EnginePool
    from duoka.serve.server import serve as run
    from duoka.serve.service import Service

    merged, options = _split_adapters(options)
    plans = _plan_engines(options, model)
    names = _model_names(server, plans[0])
    logging.basicConfig(format="%(asctime)s %(message)s")
    if server.log_requests:
        logging.getLogger("duoka").setLevel(logging.INFO)
    for plan in plans:
        note(f"loading {plan.model} on {', '.join(plan.devices)}")
    settings = [_engine_settings(plan, server, options, model) for plan in plans]
    settings = [replace(engine, adapter=merged) for engine in settings]
    pool = EnginePool(settings, _max_queue(server))
    service = Service(pool, names, fetches_images=server.allow_image_urls)
    run(service, address, on_ready=partial(_print_summary, has_key=address.key is not None))


def _engine_settings(
    plan: duoka.Plan, server: ServeOptions, options: PlanOptions, model: ModelOptions
) -> EngineSettings:
    """Return the settings for starting the engine of a plan, without an adapter to merge."""
    from duoka.serve.messages import EngineSettings

    return EngineSettings(
        plan=plan,
        max_new_tokens=options.most_new_tokens,
        trust_remote_code=model.trust_remote_code,
        is_thinking={"on": True, "off": False}.get(server.reasoning or "auto"),
    )


def _split_adapters(options: PlanOptions) -> tuple[str | None, PlanOptions]:
    """Return the adapter to merge, the one without a name; and options with the others."""
    texts = options.adapter or []
    merged = [text for text in texts if "=" not in text or Path(text).is_dir()]
    if len(merged) > 1:
        text = f"{len(merged)} adapters without a name can't be merged: {', '.join(merged)[:200]}"
        hint = "name them, for requests to choose: --adapter NAME=DIR"
        raise UsageError(text, hint=hint)
    named = replace(options, adapter=[text for text in texts if text not in merged])
    return str(Path(merged[0]).absolute()) if merged else None, named


def _model_names(server: ServeOptions, plan: duoka.Plan) -> list[str]:
    """Return the model's names for clients; refuse adapters of the same name."""
    names = server.name or [Path(plan.source).name]
    for name in {*names} & dict(plan.workload.adapters).keys():
        text = f"{name!r} is the name of the model and of an adapter"
        raise UsageError(text, hint="choose another one: --name NAME")
    return list(dict.fromkeys(names))


def _max_queue(server: ServeOptions) -> int:
    return _MAX_QUEUE if server.max_queue is None else server.max_queue


def _serve_on_ray(
    server: ServeOptions, options: PlanOptions, model: ModelOptions, address: Address
) -> None:
    """Serve with replicas on the nodes of a Ray cluster."""
    from duoka.serve.on_ray.nodes import choose_bounds, connect, plan_nodes, read_bounds
    from duoka.serve.on_ray.replica import ReplicaSettings
    from duoka.serve.on_ray.server import serve_on_ray

    options.refuse("plan_file", beside="--on ray", hint="each kind of node has a plan")
    server.refuse("log_requests", beside="--on ray", hint="omit it: Ray Serve logs the requests")
    bounds = read_bounds(options.replicas)
    if model.model is not None and Path(model.model).is_dir():  # nodes have other directories
        model = replace(model, model=str(Path(model.model).absolute()))
    merged, options = _split_adapters(options)
    checkpoint, request, _ = planning.read_request(model, _with_paged_cache(options), to_run=True)
    connect()

    def plan_for(fleet: duoka.Fleet, are_alike: bool) -> duoka.Plan:
        """Plan a replica for the GPUs of a node."""
        with working():
            if are_alike and not request.use_all:  # one replica on as few GPUs as it needs
                return plan_copies(checkpoint, request, fleet, 1, suggest=False).plans[0]
            return plan_request(checkpoint, request, fleet, suggest=False)

    cluster, left_out = plan_nodes(options.gpus, checkpoint.source, plan_for)
    low, high = choose_bounds(bounds, cluster.room)
    settings = ReplicaSettings(
        engines={
            node_id: replace(_engine_settings(plan, server, options, model), adapter=merged)
            for node_id, plan in cluster.plans.items()
        },
        names=_model_names(server, next(iter(cluster.plans.values()))),
        max_queue=_max_queue(server),
        address=address,
        fetches_images=server.allow_image_urls,
    )
    for text in left_out:
        note(f"not used: {text}")
    number = str(low) if low == high else f"{low} to {high}"
    gpus = format_count(cluster.gpus_per_replica, "GPU")
    note(f"replicas: {number}, each on {gpus} of {', '.join(cluster.names)}")
    show = partial(_show_address, model=settings.names[0], has_key=address.key is not None)
    serve_on_ray(cluster, (low, high), settings, on_ready=show)


def _with_paged_cache(options: PlanOptions) -> PlanOptions:
    """Return options with --serve set, unless a saved plan is given."""
    return options if options.plan_file is not None else replace(options, serve=True)


def _plan_engines(options: PlanOptions, model: ModelOptions) -> list[duoka.Plan]:
    """Return the plan of each engine: one per replica."""
    if options.replicas is not None:
        number = replicas.read_number(options.replicas)
        copies = planning.find_replicas(model, _with_paged_cache(options), None, number)
        return [plan.on_this_machine() for plan in copies.plans]
    plan, _, why_not = planning.find_plan_for_requests(
        model, options, requests=_MAX_REQUESTS, batch=_BATCH
    )
    if why_not:
        number = plan.workload.batch
        note(f"{why_not}: {format_count(number, 'request')} concurrent, each with its own KV cache")
    return [plan.on_this_machine()]


def _print_summary(service: Service, url: str, *, has_key: bool) -> None:
    """Print the capacity of each engine, and an example request."""
    engines = service.pool.engines
    for engine in engines:
        ready, plan = engine.capacity, engine.settings.plan
        assert ready is not None, "it is ready"
        num_full = min(ready.sequences, ready.pages * ready.page_tokens // ready.context_tokens)
        tokens = f"{ready.context_tokens:,} tokens"
        note(
            f"{service.model} on {', '.join(plan.devices)}: up to {ready.sequences} concurrent "
            f"requests; {num_full} if each uses the full context of {tokens}"
        )
    if service.adapters:
        note(f"adapters, chosen by the name of the model: {', '.join(service.adapters)}")
    _show_address(url, service.model, has_key=has_key)


def _show_address(url: str, model: str, *, has_key: bool) -> None:
    """Print the URL, and a curl command for a first request."""
    request = {"model": model, "messages": [{"role": "user", "content": "你好"}]}
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    data = json.dumps(request, ensure_ascii=False)
    stdout().print(f"{url}  (chat page; /v1 for OpenAI clients)", markup=False)
    text = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{data}'"
    stdout().print(text, markup=False, soft_wrap=True)
