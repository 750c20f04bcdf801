"""System messages anywhere in a conversation: every template reads them, in their order, or a word says why not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import Message
from skydraft.prompts.systems import readable
from tests.toys import law

from .test_chat_template import TEMPLATES, vocab_with

# As Qwen 3.5: a later system message is refused.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
VOCABS = {name: vocab_with(template) for name, template in {**TEMPLATES, "strict": STRICT}.items()}
turns = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # how many system messages come before each turn


def conversation(places: list[int]) -> list[Message]:
    """Turns of a user and an assistant; the last one is the user's."""
    told = list[Message]()
    for number, num_systems in enumerate(places[: len(places) - 1 + len(places) % 2] or [0]):
        told += [Message("system", f"S{number}-{each}") for each in range(num_systems)]
        told.append(Message("assistant" if number % 2 else "user", f"T{number}"))
    return told


@pytest.mark.parametrize("name", VOCABS)
@law(30)
@given(turns)
def test_every_message_is_read_once_and_in_its_order(name: str, places: list[int]) -> None:
    messages = conversation(places)
    text = render(VOCABS[name], readable(VOCABS[name], messages))
    at = [text.index(message.content) for message in messages]
    assert at == sorted(at) and all(text.count(message.content) == 1 for message in messages)


@pytest.mark.parametrize("name", VOCABS)
def test_a_conversation_that_grows_keeps_its_beginning(name: str) -> None:
    said = [Message("system", "S"), Message("user", "a"), Message("system", "R"), Message("assistant", "b")]
    more = [*said, Message("user", "c"), Message("system", "Q"), Message("assistant", "d"), Message("user", "e")]
    before, after = (readable(VOCABS[name], messages) for messages in (said, more))
    assert after[: len(before)] == before and readable(VOCABS[name], more[1:2]) == more[1:2]


def test_what_a_template_reads_stays_as_it_is() -> None:
    messages = conversation([2, 0, 1])
    assert readable(VOCABS["qwen2.5"], messages) == messages
    assert [each.role for each in readable(VOCABS["strict"], messages)].count("system") == 1
    assert readable(vocab_with(None), messages) == messages


def test_no_system_message_is_put_into_the_mouth_of_an_assistant() -> None:
    said = {role: Message(role, text) for role, text in (("assistant", "A"), ("system", "S"), ("user", "U"))}
    begins, ends = [said["assistant"], said["system"]], [said["system"], Message("assistant", "B", is_open=True)]
    assert readable(VOCABS["gemma"], begins) == [said["assistant"], Message("user", "S")]
    assert readable(VOCABS["strict"], [*begins, said["user"]]) == [said["assistant"], Message("user", "S\n\nU")]
    for name in ("strict", "gemma"):
        for before in ([], [said["user"], said["assistant"]]):
            told = readable(VOCABS[name], [*before, *ends])
            assert told[-1] == ends[-1] and render(VOCABS[name], told).endswith("B")
            assert [each.content for each in told] == [each.content for each in [*before, *ends]]
