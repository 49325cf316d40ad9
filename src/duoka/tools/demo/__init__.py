"""The demo: everything duoka does, on a small model that is made on the spot.

- `checkpoint`: a checkpoint in ChatGLM3's published format, with a tokenizer and weights of its own
- `training`: what it learns (`questions.toml`), and how
- `run`: planned, proved, loaded and asked as anybody does it
"""

from .checkpoint import make_checkpoint
from .run import FLEET, Demo, DemoAnswer, run_demo

__all__ = ["FLEET", "Demo", "DemoAnswer", "make_checkpoint", "run_demo"]
