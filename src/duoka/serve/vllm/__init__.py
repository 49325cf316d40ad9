"""Serve with vLLM as planned: run the exported command as a subprocess until it ends.

duoka's own engine runs on one machine. For a model that needs several machines, or for vLLM's
kernels, duoka plans and vLLM serves. vLLM is installed in an environment of its own, whose Python
the user names; it is never imported here.

- `commands`: the command of each machine, the user's options, and refusals of plans
- `nodes`: the machines that share a plan
- `launch`: starts vLLM, waits until it is healthy, forwards signals, and returns its exit code
"""

from .commands import VllmOptions, commands
from .launch import serve_with_vllm
from .nodes import parse_nodes

__all__ = ["VllmOptions", "commands", "parse_nodes", "serve_with_vllm"]
