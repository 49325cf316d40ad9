"""Checkpoint: a published model, without its weights' values. Files are untrusted input.

- `checkpoint`: configuration, tensors, tokenizer files and code together
- `config`, `sampling_params`: settings of ``config.json`` and ``generation_config.json``
- `architecture`, `adapters`, `tokenizer_files`: refusals and names, decided without torch
- `vocabulary`: vocabularies of the ChatGLM family
- `directory`, `hub`: location of the files: this machine, or the Hub
- `headers`, `index`: the tensors in each file
- `quantized`: parts of each weight of a quantized checkpoint
"""
