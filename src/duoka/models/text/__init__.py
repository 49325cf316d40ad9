"""Text: encode messages as prompts, and parse answers into content, reasoning and tool calls.

- `tokenizer`: the tokenizer of a checkpoint; for ChatGLM, built from the published vocabulary
- `chatglm_tokenizer`: a ChatGLM tokenizer with `apply_chat_template`, for scripts
- `messages`: the messages of a chat, and tool calls
- `prompts`: the chat formats of the ChatGLM family, and the choice of a format
- `chat_template`: prompts by a checkpoint's template, safe against special tokens in messages
- `image_prompts`: prompts with images, by a checkpoint's image processor
- `reasoning`: switch a model's reasoning on and off
- `answer_format`: the form of a model's answers, from its template and special tokens
- `answer_reader`: parse an answer into content, reasoning and calls during generation
- `characters`: parse fixed texts and JSON character by character
- `call_forms`, `call_grammars`: each family's form of tool calls, and grammars of forced calls
- `token_bytes`: the bytes of single tokens
"""
