"""Lessons made up, and folders of lessons from toys."""

from typing import Any

from skydraft.learning.lessons import Lesson

ORIGIN = {"draft": "d" * 32, "target": "t" * 32, "vocab": "v" * 32}


def lesson(number: int = 0, **changes: Any) -> Lesson:
    """A lesson of four tokens; `number` makes it another one."""
    given: dict[str, Any] = {
        **ORIGIN, "prompt_ids": (1, 2, number), "token_ids": (3, 4, 5, 6), "marks": "acw-",
    }  # fmt: skip
    return Lesson(**(given | changes))
