"""Text: what people write ↔ the token ids that a model takes.

- `tokenizer`: a checkpoint's tokenizer, the ChatGLM family's from its own files
- `chatglm_tokenizer`: the same for scripts, which write chats by `apply_chat_template`
- `messages`, `prompts`: a conversation → token ids, and an answer with its tool calls
- `chat_requests`, `tool_choice`: the same out of what clients of a server send
- `answer_format`: how a model's answers are read, by its template and its tokens
- `answer_reader`, `answer_parts`: an answer as it comes → content, reasoning, calls of tools
- `call_forms`, `json_text`, `call_grammars`: how each family writes calls, and must where asked to
- `token_bytes`: what single tokens are as bytes
- `image_prompts`: the images of a conversation → what a model is given of them
- `chat_template`: the same by a checkpoint's own template, without imitated special tokens
"""
