from __future__ import annotations

from contextlib import closing

import pytest

from duoka.errors import UsageError
from duoka.runtime import Conversation, Generator, Sampling

SHORT = Sampling(max_new_tokens=4)


def test_what_was_said_is_the_context(generator: Generator) -> None:
    conversation = Conversation(generator, SHORT, system="Be brief.")
    first = "".join(conversation.ask("What is NVLink?"))
    roles = [message.role for message in conversation.messages]
    assert roles == ["system", "user", "assistant"]
    assert conversation.messages[-1].content == first.strip()
    "".join(conversation.ask("And PCIe?"))
    assert [message.content for message in conversation.messages[3:4]] == ["And PCIe?"]


def test_the_second_answer_is_that_to_the_whole_history(generator: Generator) -> None:
    conversation = Conversation(generator, SHORT)
    list(conversation.ask("What is NVLink?"))
    history = conversation.messages
    said = "".join(conversation.ask("And PCIe?"))
    prompt = generator.chat.prompt([*history, conversation.messages[2]])
    (expected,) = generator.answer([prompt], SHORT)
    assert said.strip() == expected.text


def test_clearing_keeps_the_system_message(generator: Generator) -> None:
    conversation = Conversation(generator, SHORT, system="Be brief.")
    list(conversation.ask("What is NVLink?"))
    conversation.clear()
    assert [message.role for message in conversation.messages] == ["system"]


def test_the_oldest_rounds_are_left_out_when_the_context_is_full(generator: Generator) -> None:
    conversation = Conversation(generator, SHORT)
    for number in range(8):
        list(conversation.ask(f"What is {number}?"))
    assert conversation.num_forgotten > 0
    assert conversation.messages[-2].content == "What is 7?"
    assert conversation.messages[0].content != "What is 0?"
    assert conversation.messages[0].role == "user"


def test_a_question_that_is_too_long_is_refused_and_forgotten(generator: Generator) -> None:
    conversation = Conversation(generator, SHORT)
    list(conversation.ask("What is NVLink?"))
    with pytest.raises(UsageError, match=r"memory for 64") as caught:
        list(conversation.ask("What? " * 100))
    assert "--context" in str(caught.value.hint)
    assert all("What? What?" not in message.content for message in conversation.messages)


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(generator: Generator) -> None:
    conversation = Conversation(generator)
    with closing(conversation.ask("What is NVLink?")) as pieces:
        first = next(pieces)
    assert conversation.messages[-1].content == first.strip()
    assert conversation.messages[-1].role == "assistant"
