"""Thinking: the part of a text between a chat template's tags, before the answer. The text alone decides its end.

A text may begin with thinking, after blanks. Later tags are ordinary words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["before", "thinking", "gap", "answer"]  # the gap: blanks between the end tag and the answer
BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Tags:
    """`start` is "" if the prompt opens the thinking. Without an `end` there is no thinking."""

    start: str = ""
    end: str = ""

    @property
    def begin(self) -> Thought:
        return Thought(self, "before" if self.start else "thinking" if self.end else "answer")

    def after(self, text: str) -> Tags:
        """Return the tags that still apply after the beginning `text`."""
        phase = self.begin.then(text)[0].phase
        return self if phase == "before" else replace(self, start="") if phase == "thinking" else NO_TAGS

    @property
    def in_bytes(self) -> Tags:
        """The same tags for byte texts, read as Latin-1."""
        return Tags(*(tag.encode().decode("latin-1") for tag in (self.start, self.end)))


NO_TAGS = Tags()


@dataclass(frozen=True, slots=True)
class Thought:
    """The state of a text. `held` is its end while that may begin a tag, or be a blank to drop."""

    tags: Tags
    phase: Phase
    held: str = ""
    has_said: bool = False  # whether it has thought anything

    def then(self, text: str) -> tuple[Thought, str, str]:
        """Return the state after more text, and the text added to thinking and answer, without surrounding blanks."""
        if self.phase == "answer":
            return self, "", text
        if self.phase == "gap":
            rest = text.lstrip(BLANK)
            return (replace(self, phase="answer"), "", rest) if rest else (self, "", "")
        text = self.held + text
        if self.phase == "before":
            start, bare = self.tags.start, text.lstrip(BLANK)
            if not bare.startswith(start):
                if start.startswith(bare):
                    return replace(self, held=text), "", ""
                return replace(self, phase="answer", held=""), "", text
            text = bare[len(start) :]
        text = text if self.has_said else text.lstrip(BLANK)
        at = text.find(self.tags.end)
        if at >= 0:
            thought = text[:at].rstrip(BLANK)
            after, _, answer = Thought(self.tags, "gap").then(text[at + len(self.tags.end) :])
            return after, thought, answer
        kept = len(text[: len(text) - num_suspect(text, self.tags.end)].rstrip(BLANK))
        return Thought(self.tags, "thinking", text[kept:], self.has_said or kept > 0), text[:kept], ""

    @property
    def rest(self) -> tuple[str, str]:
        """The held text, as (thinking, answer), if the text ends here."""
        return (self.held, "") if self.phase == "thinking" else ("", self.held)

    @property
    def missing(self) -> str:
        """The missing rest of the end tag."""
        return self.tags.end[num_suspect(self.held, self.tags.end) :]


@dataclass(frozen=True, slots=True)
class Place:
    """The state after `num_tokens` of a text. Its answer begins at `start`, so far; tags and blanks are thinking."""

    thought: Thought = NO_TAGS.begin
    num_tokens: int = 0
    start: int = 0
    num_gap: int = 0  # blank tokens between the end tag and the answer

    @property
    def num_thinking(self) -> int:
        return self.num_tokens if self.thinks else self.start

    @property
    def has_ended(self) -> bool:
        return self.thought.phase in ("gap", "answer")

    @property
    def thinks(self) -> bool:
        return self.thought.phase == "thinking"


def num_suspect(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark` without completing it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def split(text: str, tags: Tags) -> tuple[str, str]:
    """Return thinking and answer of a whole text."""
    after, thought, answer = tags.begin.then(text)
    return thought + after.rest[0], answer + after.rest[1]
