"""Exports: a plan in the syntax of another tool.

Each tool has one module, which names the sources of the tool's syntax. A plan that a tool can't
express is refused; differences between the plan and the tool's behavior are notes. No tool is run.

- `export`: the list of tools, and the export of a plan for one of them
- `text`, `common`, `stages`: shared parts: shell text, GPUs and models, stages of whole layers
- `host_experts`: the layers whose experts are in host memory
- `gguf_file`: the weights of a GGUF file on each device
- `accelerate`, `vllm`, `sglang`, `llamacpp`, `swift`: the tools
"""

from .export import TOOLS, export, plan_for_tool, refuse_tool
from .stages import Pins

__all__ = ["TOOLS", "Pins", "export", "plan_for_tool", "refuse_tool"]
