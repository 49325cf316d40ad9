"""Checkpoint: a published model, without its weights; its files are believed as an attacker's are.

- `checkpoint`: the whole of it: configuration, tensors, tokenizer's files, code
- `config`, `sampling_params`: what ``config.json`` and ``generation_config.json`` say
- `architecture`, `adapters`, `tokenizer_files`: what they tell against the model, without torch
- `vocabulary`: what the ChatGLM family's tokenizers are made of
- `directory`, `hub`: where its files lie: on this machine, or on the Hub
- `headers`, `index`: the tensors in its files, and which file holds which
- `quantized`: what makes up which weight, where it was published quantized
"""
