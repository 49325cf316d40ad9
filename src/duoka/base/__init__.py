"""Base: what every district uses, and what knows nothing of models.

- `units`: "24GiB" ↔ bytes; counts and times in words
- `files`: regular files read within limits, written whole or not at all; the cache's directory
- `serialization`: frozen dataclasses ↔ JSON, typed and strict
- `answer_parts`: the parts of an answer: content, reasoning, calls of tools
- `images`: pictures in files, decoded within limits
- `web`: pictures at addresses, fetched within limits
- `progress`: what a long call is doing, said to whoever shows it
- `requirements`: the libraries that are installed, against those that are needed
- `model_code`: which code is a model's, and where in it an error arose
- `portable`: errors for another process
- `garbage`: what stays for good, left out of garbage collection
- `quiet`: other libraries' words about themselves, left out
- `text`: texts that others wrote, made harmless to show; choices among a few names
"""
