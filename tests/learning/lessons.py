"""Lessons made up, and folders of lessons from toys."""

from collections import Counter
from pathlib import Path
from typing import Any

from skydraft.lab.learning.lessons import Lesson, Store

ORIGIN = {"draft": "d" * 32, "target": "t" * 32, "vocab": "v" * 32}


def lesson(number: int = 0, **changes: Any) -> Lesson:
    """A lesson of four tokens; `number` makes it another one."""
    given: dict[str, Any] = {"prompt_ids": (1, 2, number), "token_ids": (3, 4, 5, 6), "marks": "acw-"}
    return Lesson(**ORIGIN | given | changes)


def filled(folder: Path, *lessons: Lesson) -> Store:
    store = Store(folder)
    for each in lessons:
        store.add(each)
    return store


def read(folder: Path) -> tuple[list[Lesson], Counter[str]]:
    """(lessons, what was skipped)"""
    skipped = Counter[str]()
    return list(Store(folder).lessons(skipped)), skipped
