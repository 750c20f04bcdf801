"""What a prompt is made of: messages, each of one role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from skydraft.errors import PromptError

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Raises PromptError for a role that no chat template knows, and for empty content."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise PromptError(f"There is no role '{self.role}'.", hint=f"Use one of: {', '.join(get_args(Role))}.")
        if not self.content.strip():
            what = "prompt" if self.role == "user" else f"{self.role} message"
            hint = "Give at least one word" + (", or - to read it from stdin." if self.role == "user" else ".")
            raise PromptError(f"The {what} is empty.", hint=hint)


def asked(prompt: str, system: str | None = None) -> tuple[Message, ...]:
    """The conversation of a single question."""
    return ((Message("system", system),) if system is not None else ()) + (Message("user", prompt),)
