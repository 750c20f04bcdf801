"""Moves system messages to places where a chat template reads them: some read only the first message, some none."""

from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

from skydraft.engines.vocab import Vocab, kept_with_vocab
from skydraft.errors import SkydraftError
from skydraft.prompts.chat_template import ANY_TOOL, render
from skydraft.prompts.messages import Message, Role


def readable(vocab: Vocab, messages: Seq[Message], tools: Seq[Any] = ()) -> list[Message]:
    """Return the conversation without system messages in places where the template refuses or drops them.

    System messages at the beginning become one. A later one goes after the user message or tool result before it. Else
    it goes before the next user message, or into a new user message at the end. So a growing conversation keeps its
    beginning. An open message stays the last.
    """
    reads_first, reads_later = _reads(vocab, bool(tools and vocab.tool_template))
    told, held = list[Message](), ""
    for message in messages:
        if message.role == "user" and held:
            told.append(replace(message, content=f"{held}\n\n{message.content}"))
            held = ""
        elif message.role != "system" or reads_later or (reads_first and not told):
            told.append(message)
        elif told and told[-1].role in ("system", "user", "tool"):
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n\n{message.content}")
        else:
            held = f"{held}\n\n{message.content}" if held else message.content
    if held:
        told.insert(len(told) - bool(told and told[-1].is_open), Message("user", held))
    return told


@kept_with_vocab
def _reads(vocab: Vocab, for_tools: bool) -> tuple[bool, bool]:
    """Whether the template reads a system message at the beginning, and later ones."""
    if vocab.chat_template is None:
        return True, True  # `render` refuses them with a message
    roles: list[Role] = ["system", "user", "assistant", "system", "user"]
    marks = [Message(role, f"xqzjv{number}") for number, role in enumerate(roles)]
    tools = [ANY_TOOL] if for_tools else []
    return _is_read(vocab, marks[:2], tools), _is_read(vocab, marks, tools)


def _is_read(vocab: Vocab, messages: Seq[Message], tools: Seq[Any]) -> bool:
    with suppress(SkydraftError):
        text = render(vocab, messages, tools)
        places = [text.find(message.content) for message in messages]
        return min(places) >= 0 and places == sorted(places)
    return False
