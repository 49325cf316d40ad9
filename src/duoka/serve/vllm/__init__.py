"""vLLM, started by a plan: the exported command as a subprocess, ready when `/health` answers.

duoka's own engine runs on one machine; where a model needs several, or vLLM's kernels are wanted,
duoka plans and vLLM answers. It lives in an environment of its own, whose Python is named: nothing
of it is imported here.

- `commands`: the command of each machine, the options of a person, plans that are refused
- `nodes`: the machines that share a plan
- `launch`: from a plan to an exit code
"""

from __future__ import annotations

from .commands import VllmOptions, commands
from .launch import serve_with_vllm
from .nodes import parse_nodes

__all__ = ["VllmOptions", "commands", "parse_nodes", "serve_with_vllm"]
