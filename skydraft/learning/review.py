"""Reading lessons again with a draft model: what it says now at each place, and how sure it is of it."""

from __future__ import annotations

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.engines.base import Engine
from skydraft.gating.signals import measure
from skydraft.learning.lesson import AGREED, CORRECTED, KNOWN, WRONG, Lesson, signals_entry


class Reviewer:
    """One draft model, which need not be the one that drafted. The engine stays open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def review(self, lesson: Lesson) -> Lesson:
        """The lesson as if this model had drafted all of it, with signals everywhere that somebody judged.

        Where only a token is known that the target would not have written, this model counts as wrong whatever it
        says. Choices are made as they were, with the lesson's own parameters. Raises what the engine raises.
        """
        engine, prompt = self._engine, lesson.prompt
        chooser = Chooser(lesson.decoding, engine.vocab, len(prompt.token_ids))
        whole = np.array([*prompt.token_ids, *lesson.token_ids], np.int32)
        base = len(prompt.token_ids)
        sequence = engine.open(prompt.token_ids, prompt.media)
        marks, signals = list(lesson.marks), []
        try:
            for start in range(base - 1, len(whole) - 1, engine.invariant_rows):
                rows = sequence.extend(whole[start : min(start + engine.invariant_rows, len(whole) - 1)])
                for length, row in enumerate(rows, start + 1):
                    signals.append(signals_entry(measure(row)))
                    if lesson.marks[length - base] in KNOWN:
                        says = chooser.choose(row, whole[:length])
                        marks[length - base] = AGREED if says == whole[length] else CORRECTED
        finally:
            sequence.close()
        assert marks.count(WRONG) == len(lesson.ranks)
        changes = {"draft": engine.fingerprint, "marks": "".join(marks), "signals": tuple(signals)}
        return lesson.model_copy(update=changes)
