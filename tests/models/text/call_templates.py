"""Chat templates that write calls as those of the families do, and tokenizers with them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CHAT = (
    _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    + _ASK
)
TEMPLATES = {
    "hermes": _CHAT.replace(
        "CALL",
        '\n<tool_call>\n{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
    ),
    "glm4.5": _CHAT.replace(
        "CALL",
        "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
        "</arg_value>\n{% endfor %}</tool_call>",
    ),
    "qwen3-coder": _CHAT.replace(
        "CALL",
        "\n<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
        "</tool_call>",
    ),
    "llama": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
    + "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    + "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
    + "<|im_end|>\n{% endfor %}"
    + _ASK,
    "mistral": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}[TOOL_CALLS] ["
    + "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    + '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ "" if loop.last else ", " }}'
    + "{% endfor %}]{% else %}{{ m.content }}{% endif %}"
    + "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    + _ASK,
    "mistral-named": _CHAT.replace(
        "CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
}
PLAIN = _CHAT.replace("CALL", "").replace(_TOOLS, "")
SPECIAL = {"llama": ["<|python_tag|>"], "mistral": ["[TOOL_CALLS]", "[ARGS]"]}


def tokenizer(name: str, template: str | None = None) -> PreTrainedTokenizerBase:
    """Bytes as tokens, and the special tokens of a family; tags are added, but not special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", *SPECIAL.get(name.split("-")[0], [])])
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=TEMPLATES[name] if template is None else template,
        clean_up_tokenization_spaces=False,
    )
    return made
