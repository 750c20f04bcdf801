"""What a folder of lessons holds, counted as it is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from skydraft.learning.lesson import CORRECTED, TAUGHT, WRONG, Lesson
from skydraft.learning.store import Store


@dataclass
class Taught:
    """Counts over lessons of one draft model and one target."""

    num_lessons: int = 0
    num_tokens: int = 0
    num_known: int = 0
    num_agreed: int = 0
    num_opinions: int = 0
    marks: Counter[str] = field(default_factory=Counter)

    def add(self, lesson: Lesson) -> None:
        """Count one more."""
        self.num_lessons += 1
        self.num_tokens += len(lesson.token_ids)
        self.num_known += len(lesson.known)
        self.num_agreed += lesson.num_agreed
        self.num_opinions += lesson.num_opinions
        self.marks.update(lesson.marks)

    @property
    def alpha(self) -> float | None:
        """How often the draft model said what the target would have said, where that is known."""
        return self.num_agreed / self.num_opinions if self.num_opinions else None

    @property
    def num_corrected(self) -> int:
        """Tokens that the target wrote where the draft model said another, or nothing."""
        return self.marks[CORRECTED] + self.marks[TAUGHT]

    @property
    def num_wrong(self) -> int:
        """Tokens that the target would not have written, and that stand."""
        return self.marks[WRONG]


def summaries(store: Store, skipped: Counter[str]) -> dict[tuple[str, str, str], Taught]:
    """Counts by (target, draft, vocabulary); lines that are no lessons are counted in `skipped`."""
    found: dict[tuple[str, str, str], Taught] = {}
    for lesson in store.lessons(skipped):
        found.setdefault((lesson.target, lesson.draft, lesson.vocab), Taught()).add(lesson)
    return found
