"""Base: helpers for every package, independent of models.

- `units`: "24GiB" ↔ bytes; counts and times in words
- `files`: regular files read within limits, written whole or not at all; the cache's directory
- `serialization`: frozen dataclasses ↔ JSON, typed and strict
- `answer_parts`: the parts of an answer: content, reasoning, calls of tools
- `images`: pictures in files, decoded within limits
- `web`: pictures at addresses, fetched within limits
- `progress`: texts about the progress of long calls
- `environment`: every environment variable that duoka reads
- `requirements`: installed versions of libraries, against the supported ranges
- `model_code`: the code of models, and errors raised in it
- `garbage`: permanent objects, excluded from garbage collection
- `quiet`: imports without other libraries' log messages
- `text`: escaping of foreign texts, choices among names, dotted names
"""
