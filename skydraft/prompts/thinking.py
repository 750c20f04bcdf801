"""Thinking by chat template: its tags, the switch that turns it on and off, and thinking in earlier messages."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError
from skydraft.prompts.chat_template import names_in
from skydraft.prompts.messages import Message
from skydraft.thinking import BLANK, Tags, split

Think = Literal["auto", "on", "off"]
REASONING = "reasoning_content"  # a message's field for the thinking before its content
_SWITCHES = ("enable_thinking", "thinking")
# End tags of Qwen, DeepSeek, Hermes, Seed and others; of Mistral; of Cohere.
_ENDS = re.compile(r"</[\w:]*(?:think|thought|reason)\w*>|\[/THINK\]|<\|END_THINKING\|>", re.IGNORECASE)
_NUM_TAIL = 64  # last tokens of a prompt, which contain its last tag


@dataclass(frozen=True, slots=True)
class Template:
    """`names` are settings that the template reads; `switch` is the one that turns thinking on, or ""."""

    tags: Tags
    names: frozenset[str]
    switch: str

    @property
    def thinks(self) -> bool:
        return bool(self.tags.end)


@lru_cache(maxsize=8)
def template_of(chat_template: str | None) -> Template:
    found = _ENDS.search(chat_template or "")
    start = found[0].replace("/", "", 1).replace("END_", "START_") if found else ""
    names = names_in(chat_template or "")
    switch = next((name for name in _SWITCHES if found and name in names), "")
    return Template(Tags(start, found[0] if found else ""), names, switch)


def settings(vocab: Vocab, think: Think, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's settings: the thinking switch, and the `given` ones, which win."""
    template = template_of(vocab.chat_template)
    return {template.switch: think == "on", **given} if think != "auto" and template.switch else dict(given)


def tags_after(vocab: Vocab, messages: Seq[Message], prompt_ids: Seq[int], think: Think = "auto") -> Tags:
    """Return the tags of the text after a prompt. Raises OptionError if the template cannot do as `think` wants."""
    template = template_of(vocab.chat_template)
    if not template.thinks:
        return Tags()
    tail = vocab.written(prompt_ids[-_NUM_TAIL:]).rstrip(BLANK)
    is_open = tail.endswith(template.tags.start)
    if messages and messages[-1].is_open:
        has_ended = has_thought(vocab, messages[-1])
        is_closed = bool(messages[-1].content) if has_ended is None else has_ended
        is_open = not is_closed and (is_open or has_ended is not None)
    else:
        is_closed = tail.endswith(template.tags.end)
        if not template.switch and {"on": not is_open, "off": not is_closed}.get(think):
            hint = "Leave out --think; --think-budget bounds it."
            raise OptionError("This model's chat template cannot turn thinking on or off.", hint=hint)
    if is_closed:
        return Tags()
    return replace(template.tags, start="") if is_open else template.tags


def apart(vocab: Vocab, messages: Seq[Message]) -> list[Message]:
    """Move thinking in the assistant's contents into `REASONING` fields."""
    tags = template_of(vocab.chat_template).tags

    def taken(message: Message) -> Message:
        if message.role != "assistant" or not tags.end or not message.content.lstrip(BLANK).startswith(tags.start):
            return message
        thought, answer = split(message.content, tags)
        return replace(message, content=answer, more=((REASONING, thought), *message.more))

    return [taken(message) for message in messages]


def has_thought(vocab: Vocab, message: Message) -> bool | None:
    """Whether the thinking of an open message has ended: by its end tag, or because an answer follows.

    None without thinking; a start tag alone counts as thinking.
    """
    (told,), end = apart(vocab, [message]), template_of(vocab.chat_template).tags.end
    has_tags = told is not message
    if not (end and message.is_open and (has_tags or dict(told.more).get(REASONING))):
        return None
    return bool(told.content) or (has_tags and end in message.content)


def resumed(vocab: Vocab, asked: str, thought: str, content: str, *, has_ended: bool) -> str:
    """Return the prompt `asked` with the given thinking and content, to be continued."""
    tags = template_of(vocab.chat_template).tags
    text = asked if asked.rstrip(BLANK).endswith(tags.start) else f"{asked}{tags.start}\n"
    return f"{text}{thought}" + (f"\n{tags.end}\n\n{content}" if has_ended else "")
