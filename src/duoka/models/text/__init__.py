"""Text: messages → token ids of a prompt, and the text of an answer → its parts.

- `tokenizer`: the tokenizer of a checkpoint, for ChatGLM built from its own files
- `chatglm_tokenizer`: the same with `apply_chat_template`, for scripts
- `messages`: the messages of a chat, and calls of tools
- `prompts`: the chat formats of the ChatGLM family, and the choice of a format
- `chat_template`: prompts by a checkpoint's template, without imitated special tokens
- `image_prompts`: prompts with images, by a checkpoint's image processor
- `answer_format`: the form of a model's answers, by its template and special tokens
- `answer_reader`: the text of an answer → content, reasoning and calls, as it is generated
- `characters`: fixed texts and JSON, read character by character
- `call_forms`, `call_grammars`: each family's form of calls, and grammars of forced calls
- `token_bytes`: the bytes of single tokens
"""
