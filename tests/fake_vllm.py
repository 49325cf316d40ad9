"""A stand-in for vLLM: its command line by the documented rules, and its server's two pages.

It is the module ``vllm.entrypoints.cli.main`` of a package that `vllm_python` lays out. What it
is told is held against vLLM 0.33's documentation ("Engine Arguments", "Parallelism and Scaling",
"Environment Variables"): unknown options, words that are no choice, sizes that aren't numbers, and
combinations that vLLM refuses end it with 2 and a sentence. Blocks are counted as vLLM counts them:
as many on every rank as the poorest has room for, of the bytes that each is given.

How it behaves beyond that is in STANDIN, a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

STANDIN: dict[str, Any] = {
    "layers": 0,  # of the model
    "layer_bytes": 4096,  # of a token in a layer's cache
    "gpus": 8,  # of this machine
    "lost_blocks": 0,  # fewer than there is room for
    "block_size": 16,
    "groups": 1,  # kinds of layers, for each of which a request has blocks
    "dies": None,  # at the start, with this exit code
    "is_healthy": True,
    "says_blocks": True,
    "ignores_term": False,
    "record": None,  # a file for what it was told, and its processes
    **json.loads(os.environ["STANDIN"]),
}
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """A number, or one with a letter: k, m and g are decimal, K, M and G binary."""
    return int(float(text[:-1]) * SIZES[text[-1]]) if text[-1] in SIZES else int(text)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("vllm")
    serve = parser.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    serve.add_argument("--headless", action="store_true")
    serve.add_argument("--enforce-eager", action="store_true")
    serve.add_argument("--trust-remote-code", action="store_true")
    serve.add_argument("--disable-log-stats", action="store_true")
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--quantization", "-q")
    serve.add_argument("--revision")
    serve.add_argument("--host")
    serve.add_argument("--api-key", nargs="*")
    serve.add_argument("--dtype", choices=DTYPES, default="auto")
    serve.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    serve.add_argument("--kv-cache-memory-bytes", type=size)
    serve.add_argument("--gpu-memory-utilization", type=share, default=0.92)
    serve.add_argument("--max-model-len", type=size)
    serve.add_argument("--max-num-batched-tokens", type=size)
    serve.add_argument("--max-num-seqs", type=size)
    serve.add_argument("--distributed-executor-backend", choices=("mp", "ray", "uni"))
    serve.add_argument("--master-addr", default="127.0.0.1")
    for names, default in (
        (("--port",), 8000),
        (("--shutdown-timeout",), 0),
        (("--pipeline-parallel-size", "-pp"), 1),
        (("--nnodes", "-n"), 1),
        (("--node-rank", "-r"), 0),
        (("--master-port",), 29501),
    ):
        serve.add_argument(*names, type=int, default=default)
    # vLLM takes dashes and underscores alike.
    words = [
        word.replace("_", "-") if word.startswith("--") and "=" not in word else word
        for word in sys.argv[1:]
    ]
    return parser.parse_args(words)


def refuse(sentence: str) -> NoReturn:
    sys.stderr.write(f"ValueError: {sentence}" + "\n")
    sys.exit(2)


def check(options: argparse.Namespace) -> list[int]:
    """Refuse what vLLM refuses; the layers of each rank."""
    ranks, nodes = options.pipeline_parallel_size, options.nnodes
    if options.model_tag is None:
        refuse("no model")
    if ranks < 1 or ranks % nodes or not 0 <= options.node_rank < nodes:
        refuse("nnodes must evenly divide the world size, and node-rank be below it")
    if nodes > 1 and options.distributed_executor_backend not in (None, "mp", "uni"):
        refuse("nnodes > 1 needs the mp backend")
    if options.headless != (options.node_rank > 0):
        refuse("every node but the first one is headless")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else list(map(str, range(STANDIN["gpus"])))
    if len(set(names)) < ranks // nodes:
        refuse(f"World size ({ranks}) is larger than the number of available GPUs ({len(names)})")
    if any(name.isdecimal() and int(name) >= STANDIN["gpus"] for name in names):
        refuse(f"there is no such GPU: {visible}")
    tokens, sequences = options.max_num_batched_tokens, options.max_num_seqs
    if tokens is not None and sequences is not None and tokens < sequences:
        refuse("max_num_batched_tokens must be at least max_num_seqs")
    return layers_by_rank(ranks)


def layers_by_rank(ranks: int) -> list[int]:
    """The layers of each rank: as they are given, or as many on each."""
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if partition is None:
        layers = STANDIN["layers"]
        return [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]
    try:
        counts = [int(count) for count in partition.split(",")]
    except ValueError:
        refuse(f"Invalid partition string: {partition}")
    if len(counts) != ranks or sum(counts) != STANDIN["layers"]:
        refuse(f"{counts} don't fit {ranks} ranks and {STANDIN['layers']} layers")
    return counts


def num_blocks(options: argparse.Namespace, counts: list[int]) -> int:
    """As many as the rank with most layers has room for."""
    given = options.kv_cache_memory_bytes or 2**30
    block_bytes = STANDIN["block_size"] * STANDIN["layer_bytes"] * max(counts)
    return int(given // block_bytes) - int(STANDIN["lost_blocks"])


def page(options: argparse.Namespace, counts: list[int]) -> str:
    """The metrics, in Prometheus's text format."""
    blocks = requests = None
    if STANDIN["says_blocks"]:
        blocks = num_blocks(options, counts)
        by_request = -(-options.max_model_len // STANDIN["block_size"]) * STANDIN["groups"]
        requests = blocks / by_request
    labels = {
        "block_size": STANDIN["block_size"],
        "cache_dtype": options.kv_cache_dtype,
        "engine": 0,
        "kv_cache_max_concurrency": requests,
        "note": 'a "quoted", \\ odd } text',
        "num_gpu_blocks": blocks,
        "num_gpu_blocks_override": None,
    }
    text = ",".join(
        '{}="{}"'.format(name, str(value).replace("\\", "\\\\").replace('"', '\\"'))
        for name, value in labels.items()
    )
    return (
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        "# TYPE vllm:cache_config_info gauge\n"
        f"vllm:cache_config_info{{{text}}} 1.0\n"
        'vllm:num_requests_running{engine="0"} 0.0\n'
    )


def group() -> list[int]:
    """The processes of this one's group."""
    known = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [number for number in known if group_of(number) == os.getpgrp()]


def group_of(process_id: int) -> int | None:
    try:
        return os.getpgid(process_id)
    except ProcessLookupError:
        return None


class Server(ThreadingHTTPServer):
    daemon_threads = False  # requests in flight are answered when it ends


def serve(options: argparse.Namespace, counts: list[int], engine: subprocess.Popen[bytes]) -> int:
    metrics = page(options, counts).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/exit":
                os._exit(7)
            if self.path == "/slow":
                Path(STANDIN["record"]).with_name("slow").touch()
                time.sleep(1)
            known = {"/metrics": metrics, "/health": b"", "/slow": b"whole"}
            status = 200 if self.path in known and STANDIN["is_healthy"] else 503
            if self.path.startswith("/v1"):
                key = os.environ.get("VLLM_API_KEY")
                status = 200 if self.headers["Authorization"] == f"Bearer {key}" else 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(known.get(self.path, b""))

        def log_message(self, *arguments: object) -> None:
            pass

    server = Server((options.host or "0.0.0.0", options.port), Handler)

    def end(signum: int, frame: object) -> None:
        name = signal.Signals(signum).name
        if STANDIN["ignores_term"] and signum == signal.SIGTERM:
            say(f"ignores {name}")
            return
        say(f"ends after {name}")
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    server.serve_forever()
    server.server_close()
    engine.terminate()
    engine.wait()
    return 0


def main() -> int:
    options = arguments()
    counts = check(options)
    if STANDIN["dies"] is not None:
        say("INFO loading")
        sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory." + "\n")
        return int(STANDIN["dies"])
    if options.headless:
        say(f"INFO headless, rank {options.node_rank} of {options.nnodes}")
        return 0
    # Its engine is a process of its own, as vLLM's is.
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if STANDIN["record"] is not None:
        told = {
            "options": vars(options),
            "argv": sys.argv,
            "environment": dict(os.environ),
            "processes": [*group(), engine.pid],
        }
        partial = Path(STANDIN["record"] + ".partial")
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.rename(STANDIN["record"])
    key = os.environ.get("VLLM_API_KEY")
    sys.stderr.write(f"INFO starts with key {key}" + "\n")
    return serve(options, counts, engine)


if __name__ == "__main__":
    sys.exit(main())
