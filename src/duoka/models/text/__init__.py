"""Text: tokenizers, chat templates, prompts and messages of a model."""
