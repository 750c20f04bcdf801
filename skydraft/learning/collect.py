"""Collecting: what a finished generation says about the draft model, kept as a lesson where the user asked for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from skydraft import api
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import LocalTarget
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, SkydraftError
from skydraft.learning.lesson import (
    AGREED,
    CORRECTED,
    TAUGHT,
    UNJUDGED,
    WRONG,
    Lesson,
    StoredMedia,
    params_entry,
    signals_entry,
)
from skydraft.learning.store import Store
from skydraft.types import Round, Signals

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud

_MAX_WAITING = 64  # lessons that could not be written yet


@dataclass
class Marks:
    """What rounds say about each token, in order: a mark, signals where the draft model spoke; ranks of failures."""

    marks: list[str] = field(default_factory=list)
    signals: list[Signals | None] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


def marks_of(rounds: Iterable[Round], *, top: int = 0) -> Marks:
    """Marks from the rounds of one generation, whose accept rule was `top`.

    A token that was skipped is marked by its audit; until one comes, and where none does, nobody judged it. With `top`
    an accepted token is one that the target ranked high, perhaps not its own choice: it says nothing.
    """
    found, num_seen = Marks(), 0
    for done in rounds:
        signals: tuple[Signals | None, ...] = done.block.signals or (None,) * len(done.block.token_ids)
        num_committed = len(done.token_ids)
        if done.record.outcome != "verified":
            found.marks += UNJUDGED * num_committed
            found.signals += signals[:num_committed]
            continue
        ranks = iter(done.audit_ranks)
        for index, agrees in enumerate(done.audit, num_seen):
            found.marks[index] = AGREED if agrees else WRONG
            found.ranks += [] if agrees else [next(ranks)]
        num_accepted = done.record.num_accepted
        found.marks += (UNJUDGED if top else AGREED) * num_accepted
        if num_committed > num_accepted:
            found.marks.append(CORRECTED if num_accepted < len(done.block.token_ids) else TAUGHT)
        found.signals += (*signals, None)[:num_committed]
        num_seen = len(found.marks)
    return found


def lesson_of(generation: Generation, draft: str, target: str, vocab: str) -> Lesson | None:
    """The lesson of a generation with models of these fingerprints; None where nobody judged anything."""
    found = marks_of(generation.rounds_so_far, top=generation.request.plan.top)
    if not set(found.marks) - {UNJUDGED}:
        return None
    prompt = generation.prompts.edge
    is_measured = any(found.signals)
    return Lesson(
        draft=draft,
        target=target,
        vocab=vocab,
        prompt_ids=prompt.token_ids,
        media=tuple(map(StoredMedia.of, prompt.media)),
        token_ids=generation.token_ids,
        marks="".join(found.marks),
        ranks=tuple(found.ranks),
        signals=tuple(map(signals_entry, found.signals)) if is_measured else (),
        params=params_entry(generation.request.params),
    )


class Collector:
    """Keeps lessons in a folder. From any thread.

    Nothing that fails here ends a generation: a lesson that cannot be written waits for the next one, and is written
    with it. `notify` gets a line when that begins, and when lessons are lost. Raises OptionError, or NotEnoughDisk, for
    a folder that cannot be written from the start.
    """

    def __init__(self, folder: Path | str, *, notify: Callable[[str], None] = lambda line: None) -> None:
        self.store = Store(Path(folder))
        self.store.prepare()
        self._notify = notify
        self._lock = threading.Lock()
        self._waiting: deque[Lesson] = deque()
        self._is_failing = False

    @contextmanager
    def start(
        self, request: GenerateRequest, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None
    ) -> Iterator[Generation]:
        """A generation, as `skydraft.start` gives it; what it teaches is kept when the block ends, in whatever way."""
        measured = replace(request, with_signals=True) if request.plan.drafts else request
        with api.start(measured, edge=edge, cloud=cloud) as generation:
            try:
                yield generation
            finally:
                self.keep(generation, edge=edge, cloud=cloud)

    def keep(self, generation: Generation, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None) -> bool:
        """Keep what a generation teaches so far; returns whether it teaches anything. Raises nothing."""
        reader = edge or (cloud if isinstance(cloud, Engine) else None)
        was_judged = any(done.record.outcome == "verified" for done in generation.rounds_so_far)
        if cloud is None or reader is None or not was_judged:
            return False
        target = LocalTarget(cloud, "exact") if isinstance(cloud, Engine) else cloud
        try:
            _, weights = target.weights(quick=True)
            lesson = lesson_of(generation, edge.fingerprint if edge else "", weights, reader.vocab.fingerprint)
        except CloudError:
            self._notify(
                "The cloud is gone and cannot say which model judged this answer: it is not kept to learn from."
            )
            return False
        if lesson is None:
            return False
        self._add(lesson)
        return True

    def _add(self, lesson: Lesson) -> None:
        with self._lock:
            self._waiting.append(lesson)
            try:
                while self._waiting:
                    self.store.add(self._waiting[0])
                    self._waiting.popleft()
                self._is_failing = False
            except SkydraftError as error:
                if not self._is_failing:
                    self._notify(f"{error.line} What is learned waits in memory until it can be written.")
                self._is_failing = True
            if len(self._waiting) > _MAX_WAITING:
                self._waiting.popleft()
                self._notify(f"The oldest of {_MAX_WAITING} answers that wait to be written is lost.")

    @property
    def num_waiting(self) -> int:
        """Lessons that could not be written yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Try once more to write what waits; says what is lost."""
        with self._lock:
            try:
                while self._waiting:
                    self.store.add(self._waiting[0])
                    self._waiting.popleft()
            except SkydraftError as error:
                self._notify(f"{error.line} {len(self._waiting)} answers could not be kept to learn from.")
                self._waiting.clear()
