from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from duoka.engine.grammar import Grammar, GrammarCompiler
from duoka.errors import UsageError
from duoka.models.text.answer_format import AnswerFormat
from duoka.models.text.call_forms import LineForm
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.models.text.prompts import chat_format
from duoka.models.text.tokenizer import load_tokenizer

from .answers import FORMS, calls, content, read, write
from .call_templates import PLAIN, TEMPLATES, tokenizer

REFERRING = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/kind"}},
    "required": ["of"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["sun", "rain"]}},
}
STRICT = {"name": "ask", "strict": True, "parameters": REFERRING}
OTHER = {
    "name": "get-1.x",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "boolean", "description": "a: b"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
QUESTION = [ChatMessage(role="user", content="how is it?")]


def sampled(answers: AnswerFormat, grammar: str, seed: int) -> str:
    """A text that a grammar allows, token by token; the first that ends."""
    stop = answers.tokenizer.eos_token_id
    assert isinstance(stop, int)
    compiler = GrammarCompiler(answers.tokenizer, [stop], None)
    matcher, detokenizer = compiler.start(Grammar.lark(grammar))
    draw, text = random.Random(seed), ""
    for _ in range(400):
        bits = int.from_bytes(matcher.allowed, "little")
        allowed = [token for token in range(bits.bit_length()) if bits >> token & 1]
        if not allowed or stop in allowed:
            return text + detokenizer.finish()
        token = draw.choice(allowed)
        text += detokenizer.add(token)
        matcher.advance(token)
    raise AssertionError(f"no end: {text[:300]}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "none"])
def test_a_forced_call_is_read_as_one(name: str, seed: int) -> None:
    made = tokenizer("hermes", PLAIN) if name == "none" else tokenizer(name)
    chat = chat_format(made, {"model_type": "llama"})
    prompt = chat.prompt(QUESTION)
    forced = chat.answers.forced_call([STRICT, OTHER], prompt, parallel=False)
    assert chat.tokenizer.decode(list(forced.prompt_ids)) == forced.text
    text = sampled(chat.answers, forced.grammar, seed)
    parts = read(chat.answers.reader([STRICT, OTHER], prompt, forced=forced), list(text))
    (call,) = calls(parts)
    assert content(parts) == ""
    expected = (
        [{"of": "sun"}, {"of": "rain"}] if call.name == "ask" else [{"n": True}, {"n": False}]
    )
    assert call.arguments in expected


def test_several_forced_calls() -> None:
    chat = chat_format(tokenizer("mistral"), {"model_type": "llama"})
    forced = chat.answers.forced_call([STRICT, OTHER])
    single = chat.answers.forced_call([STRICT, OTHER], parallel=False)
    text = (
        '[{"name": "ask", "arguments": {"of": "sun"}}, '
        '{"name": "get-1.x", "arguments": {"n": true}}]'
    )
    assert is_allowed(chat.answers, forced.grammar, text)
    assert not is_allowed(chat.answers, single.grammar, text)
    parts = read(chat.answers.reader([STRICT, OTHER], forced=forced), [text])
    assert [call.name for call in calls(parts)] == ["ask", "get-1.x"]


def is_allowed(answers: AnswerFormat, grammar: str, text: str) -> bool:
    compiler = GrammarCompiler(answers.tokenizer, [answers.tokenizer.eos_token_id], None)  # type: ignore[list-item]
    matcher, _ = compiler.start(Grammar.lark(grammar))
    for token in answers.tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=True
    ):
        if not int.from_bytes(matcher.allowed, "little") >> token & 1:
            return False
        matcher.advance(token)
    return True


def test_reasoning_ends_before_a_forced_call() -> None:
    template = TEMPLATES["hermes"].replace(
        "assistant\n{% endif %}", "assistant\n<think>{% endif %}"
    )
    chat = chat_format(tokenizer("hermes", template), {"model_type": "llama"})
    prompt = chat.prompt(QUESTION)
    forced = chat.answers.forced_call([STRICT], prompt)
    after = chat.tokenizer.decode([*prompt, *forced.prompt_ids])
    assert after.endswith("assistant\n<think></think>\n\n<tool_call>\n")
    text = '{"name": "ask", "arguments": {"of": "rain"}}'
    parts = read(chat.answers.reader([STRICT], prompt, forced=forced), [text])
    assert calls(parts) == [ToolCall(name="ask", arguments={"of": "rain"})]


@pytest.mark.slow
def test_glm4_writes_a_name_and_json(shared_data: Path) -> None:
    config = {"model_type": "chatglm"}
    directory = shared_data / "tokenizers" / "glm-4-9b-chat"
    chat = chat_format(load_tokenizer(directory, config), config)
    forced = chat.answers.forced_call([STRICT, OTHER])
    assert (forced.prompt_ids, forced.text) == ((), "")
    for text, fits in (('ask\n{"of": "rain"}', True), ('ask\n{"of": "hail"}', False)):
        assert is_allowed(chat.answers, forced.grammar, text) is fits


def test_a_name_before_mistrals_second_token() -> None:
    chat = chat_format(tokenizer("mistral-named"), {"model_type": "llama"})
    forced = chat.answers.forced_call([STRICT])
    assert forced.text == "[TOOL_CALLS]ask[ARGS]"
    special = chat.tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "[ARGS]"])
    assert (forced.prompt_ids[0], forced.prompt_ids[-1]) == tuple(special)
    assert is_allowed(chat.answers, forced.grammar, '{"of": "rain"}')
    parts = read(chat.answers.reader([STRICT], forced=forced), ['{"of": "rain"}'])
    assert calls(parts) == [ToolCall(name="ask", arguments={"of": "rain"})]
    with pytest.raises(UsageError, match="precedes a special token"):
        chat.answers.forced_call([STRICT, OTHER])


@pytest.mark.parametrize("name", ["chatglm3", "glm4.5", "qwen3-coder"])
def test_forms_that_cannot_be_forced(name: str) -> None:
    answers = AnswerFormat(tokenizer("hermes"), FORMS[name], None)
    with pytest.raises(UsageError, match="can't be forced on this model"):
        answers.forced_call([STRICT])


def test_only_strict_schemas_must_be_understood() -> None:
    answers = AnswerFormat(tokenizer("llama"), FORMS["llama"], None)
    odd: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string", "format": "?"}}}
    Grammar.lark(answers.forced_call([{"name": "f", "parameters": odd}]).grammar)
    with pytest.raises(UsageError, match="can't be compiled"):
        Grammar.lark(
            answers.forced_call([{"name": "f", "parameters": odd, "strict": True}]).grammar
        )
    with pytest.raises(UsageError, match="tools is empty"):
        answers.forced_call([])


@pytest.mark.parametrize("name", sorted(FORMS))
def test_an_answer_is_a_call_or_matches_a_schema(name: str) -> None:
    made = tokenizer(name if name.startswith("mistral") else "hermes")
    answers = AnswerFormat(made, FORMS[name], None)
    schema = '{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}'
    grammar = Grammar("lark", *answers.answer_or_call(schema, [STRICT, OTHER]))
    line = "\n" if isinstance(answers.form, LineForm) else ""
    assert written_by(answers, grammar, line + '{"x": true}') == line + '{"x": true}'
    for refused in ('{"y": true}', "I ask.", "<|im_start|>"):
        assert written_by(answers, grammar, line + refused) is None
    call = ToolCall(name="get-1.x", arguments={"n": True})
    text = written_by(answers, grammar, write(name, [call]))
    assert text == write(name, [call])
    assert calls(read(answers.reader([STRICT, OTHER]), list(text))) == [call]
    assert content(read(answers.reader([STRICT]), [line + '{"x": true}'])) == '{"x": true}'


def written_by(answers: AnswerFormat, grammar: Grammar, text: str) -> str | None:
    """The text of the tokens of an answer that the grammar allows; None if it refuses one."""
    compiler = GrammarCompiler(answers.tokenizer, [answers.tokenizer.eos_token_id], None)  # type: ignore[list-item]
    matcher, detokenizer = compiler.start(grammar)
    parts = []
    for token in answers.tokenizer.encode(text, add_special_tokens=False):
        if not int.from_bytes(matcher.allowed, "little") >> token & 1:
            return None
        matcher.advance(token)
        parts.append(detokenizer.add(token))
    return "".join(parts)


def test_tools_may_have_many_and_long_schemas() -> None:
    chat = chat_format(tokenizer("hermes"), {"model_type": "llama"})
    names = [f"p{number}" for number in range(30)]
    parameters = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    tools = [{"name": f"tool{number}", "parameters": parameters} for number in range(20)]
    Grammar.lark(chat.answers.forced_call(tools).grammar)
