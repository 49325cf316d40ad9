"""Demo: all steps of duoka on a small model, trained on the spot.

- `checkpoint`: a checkpoint in ChatGLM3's published format, with a tokenizer and weights of its own
- `training`: the questions to learn (`questions.toml`), and the training
- `run`: plan, proof, load and questions
"""

from .checkpoint import make_checkpoint
from .run import FLEET, Demo, DemoAnswer, run_demo

__all__ = ["FLEET", "Demo", "DemoAnswer", "make_checkpoint", "run_demo"]
