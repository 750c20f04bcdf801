"""From a folder of lessons to what is trained and tested with: one vocabulary, one target, no prompt on both sides."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from skydraft.errors import RecordsError
from skydraft.learning.lesson import Lesson
from skydraft.learning.store import Store

MIN_GENERATIONS = 24  # below, what is held out says nothing
MAX_GENERATIONS = 4000  # the newest; they are in memory while they are used
_HELD_OUT = 1 / 6
_MIN_HELD_OUT = 6


@dataclass(frozen=True, slots=True)
class Usable:
    """Which lessons are wanted: of a vocabulary of `vocab_size` tokens, judged by one target, and drafted by one model.

    None, or a size of 0, is any.
    """

    vocab: str | None = None
    vocab_size: int = 0
    target: str | None = None
    draft: str | None = None

    def refusal(self, lesson: Lesson) -> str:
        """Why a lesson is not wanted; "" where it is."""
        if self.vocab is not None and lesson.vocab != self.vocab:
            return "of another vocabulary"
        if self.target is not None and lesson.target != self.target:
            return "of another target"
        if self.draft is not None and lesson.draft != self.draft:
            return "of another draft model"
        if self.vocab_size and max(max(lesson.prompt_ids), max(lesson.token_ids)) >= self.vocab_size:
            return "with tokens that the vocabulary does not have"
        return ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Lessons that are wanted, the oldest first, and how many others there were, by what they are."""

    lessons: tuple[Lesson, ...]
    target: str
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def left_out(self) -> str:
        """What was left out, in words; "" where nothing was."""
        return ", ".join(f"{number} {what}" for what, number in sorted(self.skipped.items()))


def wanted(store: Store, usable: Usable, skipped: Counter[str]) -> Iterator[Lesson]:
    """The lessons of a store that are wanted, one at a time."""
    for lesson in store.lessons(skipped):
        if refusal := usable.refusal(lesson):
            skipped[refusal] += 1
        else:
            yield lesson


def choose(store: Store, usable: Usable, limit: int = MAX_GENERATIONS) -> Chosen:
    """The newest lessons with tokens of the target's. Where `usable` names no target, that of most of them is it.

    The same answer to the same prompt counts once. Raises RecordsError for too few.
    """
    if usable.target is None:
        targets = Counter(lesson.target for lesson in wanted(store, usable, Counter()) if lesson.known)
        if not targets:
            raise _too_few(store, 0)
        usable = Usable(usable.vocab, usable.vocab_size, targets.most_common(1)[0][0], usable.draft)
    skipped: Counter[str] = Counter()
    newest: deque[Lesson] = deque(maxlen=limit)
    seen: set[bytes] = set()
    for lesson in wanted(store, usable, skipped):
        key = _digest(*lesson.prompt_ids, -1, *lesson.token_ids)
        if not lesson.known or key in seen:
            skipped["that say nothing new"] += 1
            continue
        seen.add(key)
        newest.append(lesson)
    if len(newest) < MIN_GENERATIONS:
        raise _too_few(store, len(newest))
    return Chosen(tuple(newest), usable.target or "", skipped)


def _too_few(store: Store, number: int) -> RecordsError:
    if not store.files():
        return RecordsError(
            f"Nothing was collected in {store.folder}.",
            hint=f"Collect with: skydraft generate PROMPT --learn {store.folder}",
        )
    return RecordsError(
        f"{store.folder} has {number} usable answers, and {MIN_GENERATIONS} are needed: "
        f"{MIN_GENERATIONS - number} are missing.",
        hint=f"Go on with --learn {store.folder}; skydraft learn status {store.folder} says what is there.",
    )


def split(lessons: Iterable[Lesson], seed: int = 0) -> tuple[list[Lesson], list[Lesson]]:
    """(to train with, held out): about a sixth is held out, and a prompt is on one side with all its answers.

    A function of the lessons and the seed. Raises RecordsError for too few prompts.
    """
    groups: dict[bytes, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(_digest(*lesson.prompt_ids), []).append(lesson)
    order = sorted(groups, key=lambda key: hashlib.sha256(key + seed.to_bytes(8, "little")).digest())
    total = sum(map(len, groups.values()))
    held_out: list[Lesson] = []
    while order and len(held_out) < max(_MIN_HELD_OUT, total * _HELD_OUT):
        held_out += groups[order.pop()]
    trained = [lesson for key in groups if key in set(order) for lesson in groups[key]]
    if len(trained) < total / 2:
        raise RecordsError(
            f"The {total} answers are to {len(groups)} prompts, which are too few to hold some out.",
            hint="Collect answers to more prompts.",
        )
    return trained, held_out


def prompt_digest(lesson: Lesson) -> str:
    """16 hex digits that stand for the prompt of a lesson: an adapter remembers by them what it was trained on."""
    return _digest(*lesson.prompt_ids).hex()[:16]


def _digest(*token_ids: int) -> bytes:
    return hashlib.sha256(np.array(token_ids, "<i8").tobytes()).digest()
