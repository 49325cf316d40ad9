"""Engine: many requests at once on one model; a step mixes decoding sequences and prompts.

A request becomes a `Sequence`; the scheduler takes `Chunk`s of sequences (`runtime.call.chunk`) for
each step; an executor computes the step and returns an outcome for each chunk.

- `engine`: `Engine`, called from any thread; a thread of its own submits steps
- `request`: parameters and results of a request; `sequence`: a request in progress
- `scheduler`: the chunks of a step; `pages`: allocation of the cache's pages
- `executor`: computes steps, in this process; `open_executor`: the executor of a plan
- `staged_executor`, `stage_worker`, `__main__`: a process for each GPU, with its stages
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
