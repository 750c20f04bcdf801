"""A task: a prompt, and the check that judges its answer."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from skydraft.evaluation.tasks.checks import Check


class Task(BaseModel):
    """What makes a prompt a task of the set `set`.

    `messages` are the whole conversation, where it is more than the prompt. `grammar` and `max_new_tokens` (None: those
    of the mode) belong to this task, `tools` are for the chat template.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    set: str
    check: Check
    max_new_tokens: int | None = Field(default=None, ge=1)
    grammar: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
