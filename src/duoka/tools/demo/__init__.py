"""Demo: all steps of duoka with a small model that the demo trains itself.

- `checkpoint`: a checkpoint in ChatGLM3's published format, with a tokenizer and weights of its own
- `training`: the questions and answers (`questions.toml`), and the training
- `run`: plan, prove and load the model, and ask the questions
"""

from .checkpoint import make_checkpoint
from .run import FLEET, Demo, DemoAnswer, run_demo

__all__ = ["FLEET", "Demo", "DemoAnswer", "make_checkpoint", "run_demo"]
