from __future__ import annotations

from typing import Any

import pytest
from fuzzing import damaged, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.tuner.data.rows import Chat, Document, PromptCompletion, read_row, rename_columns

TOOL = {"name": "f", "description": "d", "parameters": {}}
USER, ANSWER = ChatMessage(role="user", content="q"), ChatMessage(role="assistant", content="a")
SYSTEM = ChatMessage(role="system", content="s")
CALL = ChatMessage(role="assistant", content="", calls=(ToolCall(name="f", arguments={"x": 1}),))
RESULT = ChatMessage(role="observation", content="1")
OPENAI = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

CALL_TEXT = '{"name": "f", "arguments": {"x": 1}}'


def calls(*ids: str) -> tuple[ToolCall, ...]:
    """Calls of f with x of 1, 2 …"""
    return tuple(ToolCall(name="f", arguments={"x": x}, id=ids[x - 1]) for x in (1, 2))


CHATS: dict[str, tuple[dict[str, Any], Chat]] = {
    "messages": ({"messages": OPENAI, "id": 3}, Chat(messages=(USER, ANSWER))),
    "in a text": (
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        Chat(messages=(USER, ANSWER)),
    ),
    "in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, OPENAI[1]]},
        Chat(messages=(USER, ANSWER)),
    ),
    "OpenAI's calls": (
        {
            "messages": [
                OPENAI[0],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                {"role": "tool", "content": "1", "tool_call_id": "3"},
                OPENAI[1],
            ],
            "tools": [TOOL],
        },
        Chat(messages=(USER, CALL, RESULT, ANSWER), tools=(TOOL,)),
    ),
    "answers that are not learnt": (
        {
            "messages": [
                OPENAI[0],
                {**OPENAI[1], "loss": False},
                OPENAI[0],
                {**OPENAI[1], "train": "0"},
                OPENAI[0],
                {**OPENAI[1], "loss_scale": 0.0},
                {**OPENAI[0], "weight": 0},
                {**OPENAI[1], "loss": True, "weight": 1, "images": []},
            ],
            "label": True,
            "source": "a forum",
        },
        Chat(messages=(USER, ANSWER) * 4, unweighted=frozenset({1, 3, 5, 6})),
    ),
    "ShareGPT's weight": (
        {"conversations": [TURNS[0], {**TURNS[1], "weight": 0.0}, *TURNS]},
        Chat(messages=(USER, ANSWER, USER, ANSWER), unweighted=frozenset({1})),
    ),
    "OpenAI's older calls": (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                OPENAI[0],
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": '{"x": 1}'},
                },
                {"role": "function", "name": "f", "content": "1"},
                OPENAI[1],
            ],
            "functions": [TOOL],
        },
        Chat(messages=(SYSTEM, USER, CALL, RESULT, ANSWER), tools=(TOOL,)),
    ),
    "ChatGLM3's demo": (
        {
            "tools": [TOOL],
            "conversations": [
                {"role": "user", "content": "q"},
                {"role": "tool", "name": "f", "parameters": {"x": 1}, "observation": "1"},
                {"role": "assistant", "content": "a"},
            ],
        },
        Chat(messages=(USER, CALL, RESULT, ANSWER), tools=(TOOL,)),
    ),
    "GLM-4's demo": (
        {"messages": [{"role": "system", "content": "s", "tools": [TOOL]}, *OPENAI]},
        Chat(messages=(SYSTEM, USER, ANSWER), tools=(TOOL,)),
    ),
    "ShareGPT": (
        {"conversations": TURNS, "system": "s"},
        Chat(messages=(SYSTEM, USER, ANSWER)),
    ),
    "ShareGPT's calls": (
        {
            "conversations": [
                TURNS[0],
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "1"},
                TURNS[1],
            ],
            "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
        },
        Chat(messages=(USER, CALL, RESULT, ANSWER), tools=(TOOL,)),
    ),
    "Alpaca": (
        {"instruction": "q", "input": "1", "output": "a", "system": ""},
        Chat(messages=(ChatMessage(role="user", content="q\n1"), ANSWER)),
    ),
    "Alpaca with a history": (
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["q", "a"]]},
        Chat(messages=(SYSTEM, USER, ANSWER, USER, ANSWER)),
    ),
    "Dolly": (
        {"instruction": "q", "context": "1", "response": "a", "category": "open_qa"},
        Chat(messages=(ChatMessage(role="user", content="q\n1"), ANSWER)),
    ),
    "ms-swift's query": (
        {"system": "s", "query": "q", "response": "a", "history": [["q", "a"]]},
        Chat(messages=(SYSTEM, USER, ANSWER, USER, ANSWER)),
    ),
    "ms-swift's other names": (
        {"system_prompt": "s", "question": "q", "answer": "a", "history": []},
        Chat(messages=(SYSTEM, USER, ANSWER)),
    ),
    "ChatGLM-6B": (
        {"prompt": "q", "response": "a", "history": '[["q", "a"]]'},
        Chat(messages=(USER, ANSWER, USER, ANSWER)),
    ),
    "AdvertiseGen": ({"content": "q", "summary": "a"}, Chat(messages=(USER, ANSWER))),
    "a table with every column": (
        {
            "instruction": "",
            "output": "",
            "query": "q",
            "response": "a",
            "messages": [],
            "input": "",
        },
        Chat(messages=(USER, ANSWER)),
    ),
    "a table with empty and missing columns": (
        {"instruction": "q", "output": None, "response": "a", "query": "", "prompt": None},
        Chat(messages=(USER, ANSWER)),
    ),
    "an input without an instruction": (
        {"instruction": "", "input": "q", "output": "a"},
        Chat(messages=(USER, ANSWER)),
    ),
    "ms-swift's exchanges": (
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}] * 2},
        Chat(messages=(SYSTEM, USER, ANSWER, USER, ANSWER)),
    ),
    "XTuner": (
        {
            "conversation": [
                {"system": "s", "input": "q", "output": "a", "output_with_loss": False},
                {"input": "q", "output": "a"},
            ]
        },
        Chat(messages=(SYSTEM, USER, ANSWER, USER, ANSWER), unweighted=frozenset({0, 1, 2})),
    ),
    "exchanges of conversations": (
        {"conversations": '[{"human": "q", "assistant": "a"}]'},
        Chat(messages=(USER, ANSWER)),
    ),
    "parallel calls": (
        {
            "messages": [
                OPENAI[0],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": call_id,
                            "type": "function",
                            "function": {"name": "f", "arguments": x},
                        }
                        for call_id, x in (("1", '{"x": 1}'), ("2", '{"x": 2}'))
                    ],
                },
                {"role": "tool", "content": "two", "tool_call_id": "2"},
                {"role": "tool", "content": "one", "tool_call_id": "1"},
                OPENAI[1],
            ]
        },
        Chat(
            messages=(
                USER,
                ChatMessage(role="assistant", content="", calls=calls("1", "2")),
                ChatMessage(role="observation", content="one", call_id="1"),
                ChatMessage(role="observation", content="two", call_id="2"),
                ANSWER,
            )
        ),
    ),
    "ShareGPT's parallel calls": (
        {
            "conversations": [
                *TURNS,
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "function_call", "value": '{"name": "f", "arguments": "{\\"x\\": 2}"}'},
                {"from": "observation", "value": "1"},
                {"from": "observation", "value": "1"},
                TURNS[1],
            ]
        },
        Chat(
            messages=(
                USER,
                ChatMessage(role="assistant", content="a", calls=calls("", "")),
                RESULT,
                RESULT,
                ANSWER,
            )
        ),
    ),
    "ms-swift's parallel calls": (
        {
            "messages": [
                OPENAI[0],
                {"role": "tool_call", "content": '[{"name": "f", "arguments": {"x": 1}}]'},
                {"role": "tool_call", "content": {"name": "f", "arguments": {"x": 2}}},
                {"role": "tool_response", "content": "1"},
                {"role": "tool", "content": "1"},
                OPENAI[1],
            ],
            "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
        },
        Chat(
            messages=(
                USER,
                ChatMessage(role="assistant", content="", calls=calls("", "")),
                RESULT,
                RESULT,
                ANSWER,
            ),
            tools=(TOOL,),
        ),
    ),
    "a call that is not trained beside one that is": (
        {
            "conversations": [
                TURNS[0],
                {"from": "function_call", "value": CALL_TEXT, "weight": 0},
                {"from": "function_call", "value": CALL_TEXT},
            ]
        },
        Chat(messages=(USER, CALL, CALL), unweighted=frozenset({1})),
    ),
    "prompt and response that are chats": (
        {"prompt": OPENAI[:1], "response": OPENAI[1:]},
        Chat(messages=(USER, ANSWER)),
    ),
    "prompt and completion that are chats": (
        {"prompt": OPENAI[:1], "completion": OPENAI[1:]},
        Chat(messages=(USER, ANSWER)),
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str) -> None:
    row, chat = CHATS[name]
    assert read_row(row) == chat
    assert read_row({**row, "text": None}) == chat, "a table has every column in every row"


NAMED: dict[str, tuple[dict[str, str], dict[str, Any], Any]] = {
    "a question and its answer": (
        {"prompt": "ask", "response": "label"},
        {
            "ask": "q",
            "label": "a",
            "instruction": "x",
            "input": "x",
            "text": "x",
            "messages": OPENAI,
        },
        Chat(messages=(USER, ANSWER)),
    ),
    "a question without a prompt": (
        {"query": "ask", "response": "say"},
        {"ask": "q", "say": "a"},
        Chat(messages=(USER, ANSWER)),
    ),
    "all of an exchange": (
        {"prompt": "p", "query": "i", "response": "r", "system": "persona", "history": "h"},
        {"p": "q", "i": "1", "r": "a", "persona": "s", "h": [["q", "a"]], "system": "x"},
        Chat(
            messages=(SYSTEM, USER, ANSWER, ChatMessage(role="user", content="q\n1"), ANSWER),
        ),
    ),
    "optional ones are missing": (
        {"prompt": "p", "response": "r", "system": "persona", "history": "h"},
        {"p": "q", "r": "a", "system": "x"},
        Chat(messages=(USER, ANSWER)),
    ),
    "messages": (
        {"messages": "chat"},
        {"chat": OPENAI, "text": "x"},
        Chat(messages=(USER, ANSWER)),
    ),
    "a text": ({"text": "response"}, {"response": "a", "query": "x"}, Document(["a"])),
    "context alone": (
        {"system": "persona"},
        {"persona": "s", "query": "q", "response": "a"},
        Chat(messages=(SYSTEM, USER, ANSWER)),
    ),
    "a row of another form": (
        {"prompt": "ask", "response": "say"},
        {"messages": OPENAI},
        Chat(messages=(USER, ANSWER)),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_columns(name: str) -> None:
    columns, row, content = NAMED[name]
    assert read_row(rename_columns(row, columns)) == content


def test_a_row_without_a_named_column() -> None:
    row = rename_columns({"ask": "q"}, {"prompt": "ask", "response": "say"})
    with pytest.raises(UsageError, match="'output' is not a string, but of type NoneType"):
        read_row(row)


def test_texts() -> None:
    assert read_row({"prompt": "", "completion": "a"}) == PromptCompletion("", "a")
    assert read_row({"messages": None, "text": "a"}) == Document(["a"])


BAD: dict[str, Any] = {
    "its keys are none": {},
    "its keys are question; supported: messages": {"question": "q"},
    "--columns names other keys": {"response": "a"},
    "there are no messages": {"messages": []},
    "'messages' is not a list": {"messages": {"role": "user"}},
    "not valid JSON": {"messages": "x"},
    "message 1: it is not an object": {"messages": ["x"]},
    "message 1: 'boss' is not a message role": {"messages": [{"role": "boss", "content": "x"}]},
    "message 2: a message's content must be a string, not int": {
        "messages": [OPENAI[0], {"role": "assistant", "content": 3}]
    },
    "message 1: a message has a part that is not text": {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, OPENAI[1]]
    },
    "message 2 is an empty": {"messages": [OPENAI[0], {"role": "assistant", "content": " \n"}]},
    "message 2: 'reasoning_content' isn't supported": {
        "messages": [OPENAI[0], {**OPENAI[1], "reasoning_content": "hm"}]
    },
    "message 2: a string in place of an object is not valid JSON": {
        "conversations": [TURNS[0], {"from": "function_call", "value": "f(1)"}]
    },
    "message 1: a message has a part that is not text, but of type 'reasoning'": {
        "messages": [{"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}]}]
    },
    "'documents' isn't supported here": {"query": "q", "response": "a", "documents": ["d"]},
    "message 1: 'answer' is not a string": {"conversation": [{"question": "q", "answer": 3}]},
    "message 2: a tool call has no name": {
        "messages": [OPENAI[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]
    },
    "message 1 of role 'assistant' isn't allowed at the beginning": {"messages": OPENAI[1:]},
    "message 2 of role 'observation' isn't allowed after one of role 'user'": {
        "messages": [OPENAI[0], {"role": "tool", "content": "x"}, OPENAI[1]]
    },
    "message 3 of role 'system' isn't allowed after one of role 'assistant'": {
        "messages": [*OPENAI, {"role": "system", "content": "x"}, *OPENAI]
    },
    "the last message is not an answer": {"messages": [*OPENAI, OPENAI[0]]},
    "an unpaired surrogate": {"text": "\ud800"},
    "a tool is not valid text": {
        "messages": OPENAI,
        "tools": [{**TOOL, "name": "\ud800"}],
    },
    "'tools' is not a list": {"messages": OPENAI, "tools": 3},
    "'history' is not a list of question-answer": {
        "instruction": "q",
        "output": "a",
        "history": [["q"]],
    },
    "'history' is not a list of question-answer pairs": {
        "query": "q",
        "response": "a",
        "history": OPENAI,
    },
    "message 2 is an empty answer": {"instruction": "q", "output": "", "text": "q a"},
    "'output' is not a string, but of type NoneType": {"instruction": "q", "output": None},
    "'completion' is empty": {"prompt": "q", "completion": ""},
    "'text' is empty": {"text": "\n"},
    "'label' is False: the row is marked as not trained": {
        "prompt": "q",
        "completion": "a",
        "label": False,
    },
    "'label' is false: the row": {"instruction": "q", "output": "a", "label": "false"},
    "'loss_scale' is 0: the row": {"messages": OPENAI, "loss_scale": 0},
    "'isTrained' is False": {"text": "a", "isTrained": False},
    "'weight' is 2; only true": {"messages": [OPENAI[0], {**OPENAI[1], "weight": 2}]},
    "message 2: 'loss_mask' is [0, 1]": {
        "messages": [OPENAI[0], {**OPENAI[1], "loss_mask": [0, 1]}]
    },
    "message 1: it is marked as trained": {"messages": [{**OPENAI[0], "train": True}, OPENAI[1]]},
    "'rejected' belongs to preference data (DPO, KTO)": {
        "conversations": TURNS[:1],
        "rejected": TURNS[1],
    },
    "'chosen' belongs to preference data": {"prompt": "q", "chosen": "a"},
    "'images' isn't supported: training uses text only": {"messages": OPENAI, "images": ["a.png"]},
    "message 1: 'image' isn't supported": {
        "messages": [{**OPENAI[0], "image": "a.png"}, OPENAI[1]]
    },
    "message 2: 'thoughts' isn't supported": {
        "messages": [OPENAI[0], {**OPENAI[1], "thoughts": "hm"}]
    },
    "'system' isn't supported here": {"prompt": "q", "completion": "a", "system": "s"},
    "'history' isn't supported here": {"messages": OPENAI, "history": [["q", "a"]]},
    "'tools' isn't supported here": {"text": "a", "tools": [TOOL]},
    "message 2: its 'tools' differ from those of the row": {
        "messages": [OPENAI[0], {**OPENAI[1], "tools": [TOOL]}]
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_rows(reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_row(BAD[reason])
    assert reason in str(refused.value)


@fuzz()
@given(
    row=st.sampled_from([row for row, _ in CHATS.values()]).flatmap(damaged)
    | st.dictionaries(st.sampled_from(["messages", "text", "prompt"]), st.text() | st.integers())
)
def test_damaged_rows(row: Any) -> None:
    if not isinstance(row, dict):
        return
    try:
        said = read_row(row)
    except UsageError as error:
        told_of(error, "", 1000)
        return
    if isinstance(said, Chat):
        assert said.messages[-1].role == "assistant"
