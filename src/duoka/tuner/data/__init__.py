"""Data: the user's files → micro-batches of token ids, the same ones however many GPUs there are.

- `files`, `rows`: JSON lines, tables and texts → what was said, recognised by its keys
- `samples`: what was said → token ids, by the model's own format, and which are trained
- `dataset`: all samples of some files, and every row that can't be used
- `packing`: several samples in a row of tokens, and which models keep them apart
- `batches`: samples → steps and micro-batches, in an order that can be taken up anywhere
- `preview`: the first samples for people to look at
"""

from .batches import Batches, OptimizerStep, TrainingMicroBatch
from .dataset import BadRow, Dataset, read_dataset
from .packing import refuse_packing
from .preview import render_preview

__all__ = [
    "BadRow",
    "Batches",
    "Dataset",
    "OptimizerStep",
    "TrainingMicroBatch",
    "read_dataset",
    "refuse_packing",
    "render_preview",
]
