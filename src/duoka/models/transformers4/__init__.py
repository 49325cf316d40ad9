"""The interface of transformers 4, for checkpoints' own older code.

Such code is imported with a namespace of its own (by `remote_code`); other code sees nothing of it.
Each part names the version in which transformers changed.

- `namespace`: the modules that its imports return, and its ``type``
- `config`, `model`, `cache`, `tokenizer`: the base classes of its own
"""

from .model import LegacyModel, finish_construction
from .namespace import execute

__all__ = ["LegacyModel", "execute", "finish_construction"]
