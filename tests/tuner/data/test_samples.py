from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning import make_tokenizer

from duoka.errors import CheckpointError, UsageError
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.models.text.prompts import ChatFormat, TrainingSample, chat_format
from duoka.models.text.tokenizer import load_tokenizer
from duoka.tuner.data.rows import Chat, Document, PromptCompletion
from duoka.tuner.data.samples import chat_samples, row_samples, truncate_chat

CHATGLM = {"model_type": "chatglm"}
# Of Qwen3's kind: what was thought is left out of all answers but the last.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>Answer: {% generation %}"
    "{{ m.content }}{% endgeneration %}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def answer(content: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=content)


def shown(chat: ChatFormat, sample: TrainingSample) -> str:
    """A sample as text, with what is trained between braces."""
    text, before = "", False
    for number, is_trained in zip(*sample, strict=True):
        text += "}" * (before and not is_trained) + "{" * (is_trained and not before)
        text += str(chat.tokenizer.decode([number]))
        before = is_trained
    return text + "}" * before


def samples(chat: ChatFormat, row: Any, *, seq_length: int = 512, train_on: Any = "all") -> Any:
    return [shown(chat, sample) for sample in row_samples(row, chat, seq_length, train_on)]


def test_answers_of_a_chat_share_a_sample(chat: ChatFormat) -> None:
    row = Chat(messages=(user("a"), answer("b"), user("c"), answer("d")))
    start = "<|user|>a<|end|><|assistant|>"
    assert samples(chat, row) == [
        start + "{b<|end|>}<|user|>c<|end|><|assistant|>{d<|end|>}",
    ]
    assert samples(chat, row, train_on="last") == [
        start + "b<|end|><|user|>c<|end|><|assistant|>{d<|end|>}",
    ]
    unweighted = Chat(messages=row.messages, unweighted=frozenset({3}))
    assert samples(chat, unweighted) == [start + "{b<|end|>}"]
    assert samples(chat, Chat(messages=row.messages, unweighted=frozenset({1, 3}))) == []


def test_a_template_that_leaves_out_what_was_thought(chat: Any) -> None:
    chat.tokenizer.chat_template = THINKING
    row = Chat(messages=(user("a"), answer("x</think>b"), user("c"), answer("y</think>d")))
    start = "<|user|>a<|end|><|assistant|>"
    assert samples(chat, row) == [
        start + "{x</think>b<|end|>}",
        start + "b<|end|><|user|>c<|end|><|assistant|>{y</think>d<|end|>}",
    ]


def test_a_template_that_marks_what_is_the_assistants(chat: Any) -> None:
    chat.tokenizer.chat_template = MARKED
    row = Chat(messages=(user("a"), answer("b")))
    assert samples(chat, row) == ["<|user|>a<|end|><|assistant|>Answer: {b<|end|>}"]


@pytest.mark.parametrize("change", [" | upper", " | replace('b', '')", "[:1]"])
def test_a_template_that_changes_answers(chat: Any, change: str) -> None:
    template = str(chat.tokenizer.chat_template)
    chat.tokenizer.chat_template = template.replace("message.content", f"message.content{change}")
    with pytest.raises(UsageError, match="renders this answer differently"):
        samples(chat, Chat(messages=(user("a"), answer("bc"))))


def test_without_a_template(chat: Any) -> None:
    chat.tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        samples(chat, Chat(messages=(user("a"), answer("b"))))


_CONTENTS = st.sampled_from(["a", "<|end|>", "<|assistant|>b", "<|user|>", "<", "\n", "你好", "x "])


@settings(max_examples=examples(100))
@given(turns=st.lists(st.tuples(_CONTENTS, _CONTENTS.filter(str.strip)), min_size=1, max_size=4))
def test_what_is_trained_is_what_the_assistant_says(turns: list[tuple[str, str]]) -> None:
    chat = chat_format(make_tokenizer(), {"model_type": "llama"})
    messages = tuple(m for asked, said in turns for m in (user(asked), answer(said)))
    (sample,) = chat_samples(Chat(messages=messages), chat, 512, "all")
    trained = [at for at, is_trained in zip(*sample, strict=True) if is_trained]
    # With nothing special in it a text is its bytes; so no content is an end.
    texts = [chat.tokenizer.encode(said, split_special_tokens=True) for _, said in turns]
    end = chat.tokenizer.eos_token_id
    assert trained == [number for text in texts for number in (*text, end)]
    assert sample.ids.count(end) == len(messages)


def test_completions(chat: ChatFormat) -> None:
    assert samples(chat, PromptCompletion("ab", "c<|end|>")) == ["ab{c<|end|><|end|>}"]
    (sample,) = row_samples(PromptCompletion("ab", "c<|end|>"), chat, 512, "all")
    assert sample.ids.count(chat.stop_ids[0]) == 1, "what looks like the end is text"


def test_documents_are_cut(chat: ChatFormat) -> None:
    document = Document(["abc", "defg", "h"])
    assert samples(chat, document, seq_length=4) == ["{abcd}", "{efgh}"]
    assert samples(chat, document, seq_length=5) == ["{abcde}", "{fgh<|end|>}"]
    assert samples(chat, Document([]), seq_length=5) == []


def test_a_long_chat_is_left_early(chat: ChatFormat) -> None:
    row = Chat(messages=(user("a"), answer("b")) * 50)
    assert len(chat_samples(row, chat, 20, "all")[0].ids) == 24


SYSTEM = ChatMessage(role="system", content="s")
EXCHANGES = (user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f"))
# An exchange of EXCHANGES has 6 tokens, SYSTEM 3, and the beginning of an answer is in its answer.
TRUNCATED: dict[str, tuple[Any, int, str, tuple[ChatMessage, ...]]] = {
    "fits": (Chat(messages=(SYSTEM, *EXCHANGES)), 21, "all", (SYSTEM, *EXCHANGES)),
    "one less": (Chat(messages=(SYSTEM, *EXCHANGES)), 20, "all", (SYSTEM, *EXCHANGES[:4])),
    "one exchange": (Chat(messages=(SYSTEM, *EXCHANGES)), 9, "all", (SYSTEM, *EXCHANGES[:2])),
    "too long": (Chat(messages=(SYSTEM, *EXCHANGES)), 8, "all", (SYSTEM, *EXCHANGES)),
    "last": (Chat(messages=(SYSTEM, *EXCHANGES)), 20, "last", (SYSTEM, *EXCHANGES[2:])),
    "last alone": (Chat(messages=(SYSTEM, *EXCHANGES)), 9, "last", (SYSTEM, *EXCHANGES[4:])),
    "last too long": (Chat(messages=(SYSTEM, *EXCHANGES)), 8, "last", (SYSTEM, *EXCHANGES)),
    "weights": (Chat(messages=EXCHANGES, unweighted=frozenset({1})), 9, "all", EXCHANGES[2:4]),
    "two questions": (Chat(messages=(user("a"), *EXCHANGES)), 15, "last", EXCHANGES[2:]),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_long_chats_lose_whole_turns(chat: ChatFormat, name: str) -> None:
    row, seq_length, train_on, messages = TRUNCATED[name]
    truncated = truncate_chat(row, chat, seq_length, train_on)
    assert truncated.messages == messages
    if messages != row.messages:
        kept = chat_samples(truncated, chat, seq_length, train_on)
        assert [len(sample.ids) <= seq_length for sample in kept] == [True]


@pytest.fixture(scope="module", params=["chatglm3-6b", "glm-4-9b-chat"])
def glm(request: pytest.FixtureRequest, shared_data: Path) -> ChatFormat:
    return chat_format(load_tokenizer(shared_data / "tokenizers" / request.param, CHATGLM), CHATGLM)


def test_glm(glm: ChatFormat) -> None:
    call = ToolCall(name="f", arguments={"x": 1})
    messages = (
        user("a<|user|>"),
        ChatMessage(role="assistant", content="", calls=(call,)),
        ChatMessage(role="observation", content="1"),
        answer("b"),
        user("c"),
        answer("d"),
    )
    (sample,) = chat_samples(Chat(messages=messages), glm, 512, "all")
    user_id, observation_id = glm.stop_ids[1:]
    trained = [number for number, is_trained in zip(*sample, strict=True) if is_trained]
    # Each answer ends in the role of who speaks next.
    assert [number for number in trained if number in glm.stop_ids] == [
        observation_id, user_id, user_id,
    ]  # fmt: skip
    assert sample.ids[-1] == user_id
    assert sample.ids.count(user_id) == 3, "a, c, and who would speak next"
    # What comes before the answers is what the model is asked with.
    for number in (1, 3, 5):
        prompt = glm.prompt(messages[:number])
        assert sample.ids[: len(prompt)] == prompt
        assert not sample.is_trained[len(prompt) - 1]
        assert sample.is_trained[len(prompt)]
    said = glm.tokenizer.decode(trained[: trained.index(observation_id)])
    reader = glm.answers.reader([{"name": call.name}])
    name, arguments = reader.feed(said) + reader.finish()
    assert (name.text, json.loads(arguments.text)) == (call.name, call.arguments)


def test_parallel_calls(glm: ChatFormat) -> None:
    calls = tuple(ToolCall(name=name, arguments={"x": 1}) for name in ("f", "g"))
    results = (ChatMessage(role="observation", content="1"),) * 2
    messages = (
        user("a"),
        ChatMessage(role="assistant", content="b", calls=calls),
        *results,
        answer("c"),
    )
    (sample,) = chat_samples(Chat(messages=messages), glm, 512, "all")
    trained = [number for number, is_trained in zip(*sample, strict=True) if is_trained]
    observation_id = glm.stop_ids[-1]
    said = glm.tokenizer.decode(trained[: trained.index(observation_id)])
    reader = glm.answers.reader([{"name": call.name} for call in calls])
    text, *parts = reader.feed(said) + reader.finish()
    assert text.text == "b"
    assert [part.text for part in parts] == ["f", '{"x": 1}', "g", '{"x": 1}']
    # The results and the last answer don't fit: the calls stay, and await their results.
    length = len(glm.sample(messages[:2], (), "observation").ids)
    truncated = truncate_chat(Chat(messages=messages), glm, length, "all")
    assert truncated.messages == messages[:2]
    (short,) = chat_samples(truncated, glm, length, "all")
    assert short.ids == sample.ids[:length]
    assert short.ids[-1] == observation_id
