"""vLLM: started by a plan, on one machine or several, and held to what was planned.

Sources, of vLLM 0.33: options of ``vllm serve`` (``vllm/engine/arg_utils.py``,
``vllm/entrypoints/common/cli_args.py``; docs.vllm.ai, "Engine Arguments"); several machines
(docs.vllm.ai, "Parallelism and Scaling"; ``vllm/config/parallel.py``); what /metrics says of the
cache (``vllm/v1/metrics/loggers.py``); which paths need a key
(``vllm/entrypoints/serve/middleware/authenticate.py``).

- `launch`: `serve_with_vllm`, from a plan to an exit code
- `options`: `VllmOptions`, what a person decides; the key; options that the plan decides
- `nodes`: the machines of a plan, each with its GPUs
- `commands`: what is to be run on each of them
- `interpreter`: the Python that vLLM is installed for
- `process`: vLLM as a program with all that it starts, and how signals reach it
- `ready`: whether vLLM answers, and how many cache blocks it has
"""

from .commands import NodeCommand, commands
from .launch import serve_with_vllm
from .nodes import Node, parse_nodes
from .options import VllmOptions

__all__ = ["Node", "NodeCommand", "VllmOptions", "commands", "parse_nodes", "serve_with_vllm"]
