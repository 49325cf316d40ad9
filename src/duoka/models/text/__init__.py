"""Text: what people write ↔ the token ids that a model takes.

- `tokenizer`: a checkpoint's tokenizer, the ChatGLM family's from its own files
- `chatglm_tokenizer`: the same for scripts, which write chats by `apply_chat_template`
- `messages`, `prompts`: a conversation → token ids, and an answer with its tool calls
- `image_prompts`: the images of a conversation → what a model is given of them
- `chat_template`: the same by a checkpoint's own template, without imitated special tokens
"""
