"""What people and tools say, what models answer, and what templates somebody may have written.

Whatever a text contains, a prompt has the special tokens of its structure and no others, and the
text comes out of it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing import JSON, damaged_text, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from duoka.errors import CheckpointError, UsageError
from duoka.models.text.messages import (
    ChatMessage,
    parse_python_call,
    write_python_call,
)
from duoka.models.text.prompts import ChatFormat, chat_format
from duoka.models.text.tokenizer import load_tokenizer

CHATGLM = {"model_type": "chatglm"}
TOKENS = ("<|user|>", "<|system|>", "<|assistant|>", "<|observation|>", "[gMASK]", "sop", "<sop>")
TOKENS += ("<|endoftext|>", "</s>", "<s>", "<|im_start|>", "<|im_end|>", "[MASK]", "\ue0f0", "x")
PIECES = st.sampled_from((*TOKENS, "<|im_", "end|>", "<|", "|>", "<", ">", "|im_end|", "\n", " "))
# The texts that make trouble are those that look like special tokens, whole or in part.
SAID = st.lists(PIECES | st.text(max_size=6), max_size=8).map("".join)
ROLES = st.sampled_from(("user", "assistant", "observation", "system"))
TALKS = st.lists(st.tuples(ROLES, SAID), max_size=4).map(lambda said: [*said, ("user", "")])
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatglm2(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("chatglm2")
    vocabulary = shared_data / "tokenizers" / "chatglm3-6b" / "tokenizer.model"
    (directory / "tokenizer.model").write_bytes(vocabulary.read_bytes())
    config = {**CHATGLM, "_name_or_path": "THUDM/chatglm2-6b"}
    return chat_format(load_tokenizer(directory, config), config)


@pytest.fixture(scope="module")
def chatglm3(small_checkpoint: Path) -> ChatFormat:
    return chat_format(load_tokenizer(small_checkpoint, CHATGLM), CHATGLM)


@pytest.fixture(scope="module")
def glm4(shared_data: Path) -> ChatFormat:
    directory = shared_data / "tokenizers" / "glm-4-9b-chat"
    return chat_format(load_tokenizer(directory, CHATGLM), CHATGLM)


@pytest.fixture(scope="module")
def template_tokenizer() -> PreTrainedTokenizerBase:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def template(template_tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return chat_format(template_tokenizer, {"model_type": "llama"})


def special_in(chat: Any, ids: list[int]) -> list[int]:
    special = set(chat.tokenizer.all_special_ids)
    special |= {number for number, t in chat.tokenizer.added_tokens_decoder.items() if t.special}
    return [number for number in ids if number in special]


def check(chat: Any, talk: list[tuple[Any, str]], last: str) -> None:
    said = [*talk[:-1], ("user", last)]
    try:
        messages = [ChatMessage(role=role, content=content) for role, content in said]
        ids = chat.prompt(messages)
    except UsageError as error:
        told_of(error, "", 600)
        return
    harmless = chat.prompt([ChatMessage(role=role, content="y") for role, _ in said])
    assert special_in(chat, ids) == special_in(chat, harmless)
    text = chat.tokenizer.decode(ids, skip_special_tokens=False)
    for _, content in said:
        # Published tokenizers join blanks and replace what isn't normal Unicode.
        if content.isascii() and "  " not in content and content.isprintable():
            assert content.strip() in text


@pytest.fixture(scope="module", params=["chatglm2", "chatglm3", "glm4", "template"])
def chat(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@fuzz()
@given(TALKS, SAID)
def test_chats(chat: ChatFormat, talk: Any, last: str) -> None:
    check(chat, talk, last)


@pytest.mark.slow
@fuzz()
@given(st.lists(JSON | st.dictionaries(st.sampled_from(("name", "function", "x")), JSON)))
def test_tools(chatglm3: ChatFormat, template: ChatFormat, tools: list[Any]) -> None:
    asked = [ChatMessage(role="user", content="y")]
    for chat in (chatglm3, template):
        try:
            ids = chat.prompt(asked, tools)
        except UsageError as error:
            told_of(error, "", 600)
            continue
        assert len(special_in(chat, ids)) <= len(special_in(chat, chat.prompt(asked))) + 1


BLOCKS = st.sampled_from(
    (
        *(
            "{% for m in messages %}",
            "{% endfor %}",
            "{% if m %}",
            "{% endif %}",
            "{{ m.content }}",
        ),
        *("{{ messages }}", "{{ m.content }}", "{% set x = messages[0] %}", "{{ x | tojson }}"),
        *("{{ ''.__class__ }}", "{% macro f() %}", "{% endmacro %}", "{{ f() }}", "{#", "{{", "%}"),
        *("{{ raise_exception() }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}"),
        *("<|im_start|>", "-%}"),
    )
)
TEMPLATES = st.lists(BLOCKS | st.text(max_size=5), max_size=8).map("".join) | damaged_text(TEMPLATE)


@fuzz()
@given(TEMPLATES, SAID)
def test_templates(
    template: Any, template_tokenizer: PreTrainedTokenizerBase, text: str, said: str
) -> None:
    template_tokenizer.chat_template = text
    try:
        ids = template.prompt([ChatMessage(role="user", content=said)])
    except (UsageError, CheckpointError) as error:
        told_of(error, "", 700)
    else:
        harmless = "y" * len(said)
        if "{" not in text:
            fixed = template.prompt([ChatMessage(role="user", content=harmless)])
            assert special_in(template, ids) == special_in(template, fixed)
        shown = template_tokenizer.decode(ids)
        assert "<class" not in shown or "<class" in text + said
    finally:
        template_tokenizer.chat_template = TEMPLATE


NAMES = st.sampled_from(("weather", "x", "")) | st.text(max_size=6)
CODE = damaged_text("tool_call(city='北京', days=[1, {'a': None}], note=\"it's\", far=-2.5)")
CALLS = CODE.map(lambda code: f"```python\n{code}\n```") | damaged_text(
    "```python\ntool_call()\n```"
)


@fuzz()
@given(NAMES, CALLS | st.text())
def test_python_calls(name: str, content: str) -> None:
    call = parse_python_call(name, content)
    if call is not None:
        assert parse_python_call(call.name, write_python_call(call)) == call
        assert all(isinstance(key, str) for key in call.arguments)
