"""The interface of transformers 4 for remote code of its time (legacy code).

`remote_code` runs legacy code with a namespace of its own; other code isn't affected. Comments name
the version in which transformers changed.

- `namespace`: the modules that legacy code gets from imports, and its builtin ``type``
- `config`, `model`, `cache`, `tokenizer`: the base classes of legacy code
"""

from .model import LegacyModel, finish_construction
from .namespace import execute

__all__ = ["LegacyModel", "execute", "finish_construction"]
