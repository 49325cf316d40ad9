"""The demo: everything duoka does, on a small model that is made on the spot.

It makes a checkpoint in the published ChatGLM3 format, with a tokenizer and weights of its own,
trained on `questions.toml`; then it plans, proves, loads and asks it through the same public
functions as anybody.
"""

from .checkpoint import make_checkpoint
from .run import FLEET, Demo, DemoAnswer, DemoMemory, run_demo

__all__ = ["FLEET", "Demo", "DemoAnswer", "DemoMemory", "make_checkpoint", "run_demo"]
