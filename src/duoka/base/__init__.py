"""Base: helpers for every package, independent of models.

- `units`: "24GiB" ↔ bytes; counts and times in words
- `files`: regular files, read within limits and written atomically; the cache directory
- `serialization`: frozen dataclasses ↔ JSON, typed and strict
- `answer_parts`: the parts of an answer: content, reasoning, tool calls
- `prompt_settings`: settings of a prompt: thinking, and continuing the last message
- `images`: images in files, decoded within limits
- `web`: images at URLs, fetched within limits
- `progress`: progress messages of long calls
- `requirements`: installed versions of libraries, against the supported ranges
- `model_code`: the code of models, and errors raised in it
- `garbage`: permanent objects, excluded from garbage collection
- `quiet`: imports without other libraries' log messages
- `text`: escaping of untrusted texts, choices among names, dotted names
"""
