"""Keep finished generations as lessons about the draft model, if the user asked for it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from skydraft.decoding.accounts.audits import Audit
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import CloudError, SkydraftError
from skydraft.lab.learning.lessons import AGREED, CORRECTED, TAUGHT, UNJUDGED, WRONG, Lesson, Store, params_entry
from skydraft.types import Round

_FACTS_S = 0.5  # timeout of the question which model a server runs


def marks_of(rounds: Iterable[Round], audit: Audit = ()) -> str:
    """Return a mark for each token, from the rounds of one generation.

    A skipped token is unjudged unless an audit, of a later round or of the whole text, marks it. A token copied without
    the draft model shows nothing about that model. If the draft model read the target's tokens, they show whether it
    agrees. A token that a grammar forces shows nothing about either model.
    """
    marks, num_seen, forced = list[str](), 0, list[int]()
    for done in rounds:
        committed = done.block.forced[: len(done.token_ids)]
        forced += [index for index, is_forced in enumerate(committed, done.block.base) if is_forced]
        for index, agrees in enumerate(done.block.read, done.block.base - done.block.num_unread - len(done.block.read)):
            if marks[index] == TAUGHT:
                marks[index] = UNJUDGED if agrees is None else AGREED if agrees else CORRECTED
        num_committed = len(done.token_ids)
        if done.record.outcome in ("skipped", "fallback"):
            of_audit = [AGREED if agrees else WRONG for agrees in audit[len(marks) : len(marks) + num_committed]]
            marks += of_audit or [UNJUDGED] * num_committed
            continue
        for index, agrees in enumerate(done.audit, num_seen):
            marks[index] = AGREED if agrees else WRONG
        is_copied, num_accepted = done.block.is_copied, done.record.num_accepted
        marks += (TAUGHT if is_copied else AGREED) * num_accepted
        if num_committed > num_accepted:
            marks.append(TAUGHT if is_copied or num_accepted == len(done.block.token_ids) else CORRECTED)
        num_seen = len(marks)
    for index in forced:
        marks[index] = UNJUDGED if marks[index] == AGREED else marks[index]
    return "".join(marks)


def lesson_of(generation: Generation, draft: str, target: str, vocab: str, audit: Audit = ()) -> Lesson | None:
    """Return the lesson of a generation with models of these fingerprints; None if the target judged nothing."""
    marks = marks_of(generation.rounds_so_far, audit)
    if generation.finish_reason == "content_filter":
        marks = marks[:-1] + UNJUDGED  # the filter chose the end
    if not set(marks) - {UNJUDGED}:
        return None
    return Lesson(
        draft=draft, target=target, vocab=vocab, prompt_ids=generation.request.prompts.edge.token_ids, marks=marks,
        token_ids=generation.token_ids, params=params_entry(generation.request.params),
    )  # fmt: skip


class Collector:
    """An observer that keeps lessons in a folder. Any thread may use it.

    A lesson that cannot be kept is lost, but generations continue. `notify` gets one line for each reason, and at the
    end the number of lost lessons. Raises OptionError or NotEnoughDisk if the folder cannot be written at the start.
    """

    def __init__(self, folder: Path | str, *, notify: Callable[[str], None] = lambda line: None) -> None:
        self.store = Store(Path(folder))
        self.store.prepare()
        self._notify, self._lock = notify, threading.Lock()
        self._lost = Counter[str]()  # by reason

    def begins(self, request: GenerateRequest) -> bool:
        return False

    def ended(self, generation: Generation) -> None:
        if not generation.is_audited:  # else the auditor keeps it, with its audit
            self.keep(generation)

    def keep(self, generation: Generation, audit: Audit = ()) -> bool:
        """Keep the lesson of a generation and its audit. Return whether there was one."""
        edge, target = generation.edge, generation.target
        reader = edge or (target.engine if target else None)
        was_judged = bool(audit) or any(done.record.outcome == "verified" for done in generation.rounds_so_far)
        chosen = generation.request.begun or generation.request.params.logit_bias  # by the user, not by the models
        if target is None or reader is None or not was_judged or chosen:
            return False
        if generation.request.prompts.edge.media:
            return self._lose("Answers to speech are not kept: the draft model cannot learn from them.")
        facts = None
        with suppress(CloudError):
            facts = target.facts(_FACTS_S)
        if facts is None or not facts.weights:
            why = "The server does not tell which model it runs" if facts else "The cloud was lost"
            return self._lose(f"{why}, so this answer is not kept: the model that checked it is unknown.")
        lesson = lesson_of(generation, edge.fingerprint if edge else "", facts.weights, reader.vocab.fingerprint, audit)
        return lesson is not None and self.add(lesson)

    def add(self, lesson: Lesson) -> bool:
        try:
            self.store.add(lesson)
        except SkydraftError as error:
            return self._lose(f"{error.line} Nothing can be learned from answers that are not written.")
        return True

    def _lose(self, why: str) -> Literal[False]:
        with self._lock:
            self._lost[why] += 1
            is_first = self._lost[why] == 1
        if is_first:
            self._notify(why)
        return False

    def close(self) -> None:
        if number := self._lost.total():
            self._notify(f"{number} answers could not be kept to learn from.")
