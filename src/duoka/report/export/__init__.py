"""Exports: a plan in the words of the tools that people already run.

Each tool has one file, which names the page or file that its grammar was learnt from. What a tool
can't express is refused, and what it will do otherwise than the plan is told in notes. It runs none
of them.

- `export`: from a plan to one tool's words, and which tools there are
- `text`, `common`, `stages`: what several tools share: shell text, GPUs and models, whole layers
- `accelerate`, `vllm`, `sglang`, `llamacpp`, `torch_pipelining`, `deepspeed`: the tools
"""

from .export import TOOLS, export, plan_for_tool, refuse_tool
from .stages import Pins

__all__ = ["TOOLS", "Pins", "export", "plan_for_tool", "refuse_tool"]
