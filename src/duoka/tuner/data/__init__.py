"""Data: the user's files → micro-batches of token ids, equal for any number of GPUs.

- `files`, `rows`: JSON lines, tables and texts → chats, completions or documents, by their keys
- `images`: images of rows → references, of which training opens the images again
- `pairs`: a row of preference data → the contents with its chosen and its rejected answer
- `samples`: a row → token ids in the model's chat format, with a mask of the trained tokens
- `dataset`: all samples of the files, and all unusable rows
- `packing`: several samples in a row of tokens, for models that keep them separate
- `batches`: samples → steps and micro-batches, in an order that can be resumed at any step
- `preview`: the first samples, for review by the user
"""

from .batches import IGNORED, Batches, OptimizerStep, TrainingMicroBatch
from .dataset import BadRow, Dataset, read_dataset
from .images import image_size, open_image
from .packing import refuse_packing
from .preview import render_preview

__all__ = [
    "IGNORED",
    "BadRow",
    "Batches",
    "Dataset",
    "OptimizerStep",
    "TrainingMicroBatch",
    "image_size",
    "open_image",
    "read_dataset",
    "refuse_packing",
    "render_preview",
]
