"""Engine: many requests at once on one model, every step a mix of answers and prompts.

- `engine`: `Engine`, asked from any thread; a thread of its own submits steps
- `request`: what is asked, and what comes of it; `sequence`: an answer on its way
- `scheduler`, `step`: which tokens a step computes; `pages`: whose pages are whose
- `executor`: what computes steps, in this process; `open_executor`: which one a plan gets
- `staged_executor`, `stage_worker`, `__main__`: a process for each GPU, with its stages
- `paged_model`: a model with a paged cache on the devices of its layers
- `cached_model`: a model with a cache of its own for each sequence
- `conversation`: questions and answers in rounds; `batch`: files of prompts and answers
- `detokenizer`: text from tokens that come one by one; `timing`: how fast answers came
- `sampler`: a token from each row of logits
- `grammar`: the tokens that fit an answer's grammar; `generation_rules`: those that a checkpoint's
  generation config forbids and forces
"""

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from .engine import Engine, Stream
    from .grammar import Grammar
    from .request import Completion, SamplingParams, TokenChoice

__all__ = ["Completion", "Engine", "Grammar", "SamplingParams", "Stream", "TokenChoice"]
