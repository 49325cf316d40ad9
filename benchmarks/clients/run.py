"""Run other projects' clients against `duoka serve`, and count what works.

    python benchmarks/clients/run.py --python VENV/bin/python [--node FOLDER] [client …]

VENV has the clients, FOLDER the `node_modules` of those in JavaScript. The models are small and
have random weights: grammars make their structured outputs and forced tool calls valid. A server
whose engine is scripted calls tools under `tool_choice: auto`: first `add` twice, with the number
of results and 2, then the tool that takes an `Answer`, if there is one; otherwise it answers with
an `Answer` where a format is required, and else with the last result.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import scripted
import served
import tuning
import uvicorn
from image_checkpoints import write_family
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from duoka.serve.app import make_app
from duoka.serve.messages import EngineRequest, Event
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

HERE = Path(__file__).parent
KEY, MODEL = "secret-key", "tiny"
served._START_SECONDS = 900  # three at once
_GPUS = ("--gpus", "virtual:1x512MiB", "--sequences", "4")
_SERVERS = {
    "LLAMA": ("--context", "2048"),
    "THINKER": ("--context", "2048"),
    "VISION": ("--images", "1", "--image-size", "60x56", "--context", "256"),
}
_CONTENT = "{{ message.content }}"
_CALLS = "{% for c in message.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
_TEMPLATES = {
    "LLAMA": tuning.TEMPLATE.replace(_CONTENT, _CONTENT + _CALLS),
    "THINKER": tuning.TEMPLATE.replace("<|assistant|>{%", "<|assistant|><think>\n{%").replace(
        _CONTENT, "{{ message.content.split('</think>')[-1] }}" + _CALLS
    ),
}


class AgentPool(scripted.ScriptedPool):
    """Calls tools, and answers with their results."""

    async def submit(
        self, request: EngineRequest, tokens: int, key: str = ""
    ) -> AsyncGenerator[Event, None]:
        if request.task != "generate":
            async for event in super().submit(request, tokens, key):
                yield event
            return
        for event in answer(request):
            yield event


def answer(request: EngineRequest) -> Iterator[Event]:
    """The events of an answer; see above."""
    turns = request.prompt.messages or ()
    results = [turn.content for turn in turns if turn.role == "tool"]
    tools = {tool["function"]["name"]: str(tool) for tool in request.prompt.tools}
    outputs = [name for name, text in tools.items() if "is_it" in text]
    yield scripted.begun()
    value = json.dumps({"is_it": True, "other": False})
    if "add" in tools and len(results) < 2:
        yield scripted.delta("I reckon.", "reasoning")
        if not request.params.get("response_format"):
            yield scripted.delta("I add.")
        yield from call("add", json.dumps({"a": len(results), "b": 2}))
    elif outputs:
        yield from call(outputs[0], value)
    else:
        text = value if request.params.get("response_format") else f"It is {results[-1:]}."
        yield scripted.delta(text)
        yield scripted.ended()


def call(name: str, arguments: str) -> Iterator[Event]:
    """The events of a tool call, and the end."""
    yield scripted.delta(name, "tool_name")
    for part in (arguments[:6], arguments[6:]):
        yield scripted.delta(part, "tool_arguments")
    yield scripted.ended("tool_calls")


@contextlib.contextmanager
def serving_agent() -> Iterator[str]:
    """Serve the scripted engine; yield the address."""
    service = Service(cast(EnginePool, AgentPool(())), MODEL)
    server = uvicorn.Server(
        uvicorn.Config(make_app(service, key=KEY), port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def write_models(folder: Path) -> dict[str, Path]:
    """Write the checkpoints of the servers."""
    tuning.CONFIGS["long"] = lambda: LlamaConfig(
        **{**tuning.SIZES, "max_position_embeddings": 2048}
    )
    paths = {name: folder / name / MODEL for name in _SERVERS}
    for name, template in _TEMPLATES.items():
        tuning.write_model("long", paths[name])
        weights = load_file(paths[name] / "model.safetensors")
        (paths[name] / "chat_template.jinja").write_text(template)
        # An answer doesn't end before its limit, and JSON has little white space.
        spaces = tuning.make_tokenizer().encode(" \n\t\r")
        weights["lm_head.weight"][[2, *spaces, *range(256, 260)]] = 0
        save_file(weights, paths[name] / "model.safetensors", {"format": "pt"})
    write_family("llava", paths["VISION"])
    return paths


def serve(name: str, path: Path, log: Path) -> contextlib.AbstractContextManager[served.Served]:
    """Return a server of a checkpoint, which starts when it is entered."""
    key = {"DUOKA_API_KEY": KEY}
    return served.serving(path, log, *_SERVERS[name], gpus=_GPUS, environment=key)


def run_client(script: Path, options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run a client's checks; print failures and counts, and return the number of failures."""
    program = [options.python, str(script)]
    if script.suffix == ".mjs":
        copied = Path(options.node) / script.name  # modules are looked for beside the file
        copied.write_text(script.read_text())
        program = ["node", str(copied)]
    done = subprocess.run(
        program, env={**os.environ, **environment}, text=True, capture_output=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"check"')]
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    failed = [result for result in results if result["error"]]
    for result in failed:
        print(f"  {script.stem}.{result['check']}: {result['error']}")
    if done.returncode or not results:
        print(f"  {script.stem} ended with {done.returncode}: {done.stderr[-3000:]}")
    print(f"{script.stem}: {len(results) - len(failed)} of {len(results)} passed", flush=True)
    return len(failed) + (done.returncode != 0) + (not results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--node", default="")
    parser.add_argument("--hold", type=float, default=0, help="only serve, for so many seconds")
    parser.add_argument("clients", nargs="*")
    options = parser.parse_args()
    scripts = [HERE / name for name in options.clients] or sorted(HERE.glob("with_*"))
    image = io.BytesIO()
    Image.effect_noise((60, 56), 99).convert("RGB").save(image, "PNG")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {"AGENT": stack.enter_context(serving_agent())}
        environment["IMAGE"] = base64.b64encode(image.getvalue()).decode()
        paths = write_models(folder)
        servers = [serve(name, path, folder / f"{name}.log") for name, path in paths.items()]
        with ThreadPoolExecutor() as pool:
            addresses = list(pool.map(stack.enter_context, servers))
        for (name, path), server in zip(paths.items(), addresses, strict=True):
            environment |= {name: server.url, f"{name}_DIRECTORY": str(path)}
        if options.hold:
            print("\n".join(f"export {name}={value}" for name, value in environment.items()))
            sys.stdout.flush()
            time.sleep(options.hold)
            return
        failures = sum(run_client(script, options, environment) for script in scripts)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
