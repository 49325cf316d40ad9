"""Engine: continuous batching; each step mixes decoding sequences and prefill chunks.

A request becomes a `Sequence`. For each step, the scheduler chooses `Chunk`s of sequences
(`runtime.call.chunk`), and an executor computes them and returns an outcome for each chunk.

- `engine`: `Engine`, called from any thread; a thread of its own submits steps
- `request`: parameters and results of a request; `sequence`: the state of a request in progress
- `reasoning`: limits of the reasoning in an answer
- `scheduler`: chooses the chunks of each step; `pages`: allocates the KV cache's pages
- `executor`: computes steps, in this process; `open_executor`: the executor of a plan
- `staged_executor`, `stage_worker`, `__main__`: a process for each GPU, with its stages;
  `stage_graphs`: CUDA graphs of the stages
- `conversation`: a chat in rounds; `batch`: files of prompts and of their answers
- `detokenizer`: incremental detokenization; `timing`: measured speed of generations
- `sampler`: samples a token from each row of logits
- `grammar`: structured output; `generation_rules`: tokens that a checkpoint's generation config
  forbids or forces
"""

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from .engine import Engine, Stream
    from .grammar import Grammar
    from .request import Completion, SamplingParams, TokenChoice

__all__ = ["Completion", "Engine", "Grammar", "SamplingParams", "Stream", "TokenChoice"]
