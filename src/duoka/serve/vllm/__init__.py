"""Serve with vLLM as planned: run the exported command as a subprocess until it ends.

For vLLM's kernels, duoka plans and vLLM serves. vLLM is installed in an environment of its own,
whose Python the user names; it is never imported here.

- `commands`: the command, the user's options, and refusals of plans
- `launch`: starts vLLM, waits until it is healthy, forwards signals, and returns its exit code
"""

from .commands import VllmOptions, make_command
from .launch import serve_with_vllm

__all__ = ["VllmOptions", "make_command", "serve_with_vllm"]
