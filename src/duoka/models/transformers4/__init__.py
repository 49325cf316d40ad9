"""What code written for transformers 4 finds here, as it was: for checkpoints' own code alone.

Such code is imported with names of its own (`remote_code` does that); nothing that others use is
changed. Each part names the version without which it isn't needed.

- `namespace`: what its imports give, and its ``type``
- `config`, `model`, `cache`, `tokenizer`: the base classes of its own
"""

from .model import LegacyModel, finish_construction
from .namespace import execute

__all__ = ["LegacyModel", "execute", "finish_construction"]
