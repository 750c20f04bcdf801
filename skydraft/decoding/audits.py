"""Audits: the target reads a share of the finished answers, and says which of their tokens it would have written."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from skydraft.config import DEFAULT_MODE
from skydraft.decoding.builder import prompted
from skydraft.decoding.context import Context
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import AuditFigures
from skydraft.decoding.target import Target
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.types import DraftBlock

log = logging.getLogger("skydraft.decoding")

Audit = tuple[bool, ...]  # for each token of an answer: whether the target would have written it
ASKED = make_plan("auto").gate.threshold  # of texts that nothing checks; a calibrated gate names its own
_MAX_WAITING, _NEWEST = 16, 100  # answers
_MAX_WATCHED = 64  # clients may ask for any gate
_READING = make_plan(DEFAULT_MODE)  # exact, and soon over where the cloud is gone


class Watched:
    """The audits of answers that one adapter of one model drafted and one gate checked.

    `note` bets on "they agree less than `asked`": each bet multiplies its capital by 1 + rate * (asked - share of the
    answer), so no capital is expected to grow while the mean, given all before, is at least `asked` (Waudby-Smith and
    Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024). A bet begins at each answer, the
    n-th with 1 / (n (n + 1)) of the money, since tasks may change after long agreement. By Ville's inequality an alarm
    is false with probability `alarm` at most, however long it runs; it comes where the upper bound of a confidence
    sequence of that level falls below `asked`.
    """

    def __init__(self, fingerprint: str, asked: float | None, alarm: float = 0.01) -> None:
        self.fingerprint, self.asked, self.is_raised = fingerprint, asked, False
        self._newest: deque[Audit] = deque(maxlen=_NEWEST)
        self._rates = [] if asked is None or asked >= 1 else [share / (1 - asked) for share in (0.1, 0.3, 0.6)]
        self._capital, self._num, self._limit = [0.0] * len(self._rates), 0, len(self._rates) / alarm

    def note(self, audit: Audit) -> bool:
        """Take in the next answer; returns whether that is the alarm."""
        self._newest.append(audit)
        if self.asked is None or self.is_raised:
            return False
        self._num += 1
        won, begun = self.asked - sum(audit) / len(audit), 1 / (self._num * (self._num + 1))
        bets = zip(self._capital, self._rates, strict=True)
        self._capital = [(capital + begun) * (1 + rate * won) for capital, rate in bets]
        self.is_raised = bool(self._rates) and sum(self._capital) >= self._limit
        return self.is_raised

    def figures(self, adapter: str | None, gate: str) -> AuditFigures:
        share = sum(map(sum, self._newest)) / sum(map(len, self._newest))
        return AuditFigures(adapter, gate, round(share, 4), len(self._newest), self.asked, self.is_raised)


class Auditor:
    """An observer that lets `target` read `share` of the finished answers by `edge`, in a thread of its own.

    Which ones is drawn before they begin. Where they agree less than was asked, later texts are checked more, and
    `notify` gets a line. `kept` gets each answer that was drawn, with its audit; an empty one if there is none.
    """

    def __init__(
        self, edge: Engine, target: Target, share: float, notify: Callable[[str], None],
        kept: Callable[[Generation, Audit], object] = lambda generation, audit: None,
        draw: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._edge, self._target, self._share = edge, target, share
        self._notify, self._kept, self._draw = notify, kept, draw
        self.counts = Counter(read=0, lost=0, dropped=0)  # lost with the target; dropped, since too many waited
        self._watched: dict[tuple[str | None, str], Watched] = {}  # by adapter and gate, the newest last
        self._lock = threading.Lock()  # for these
        self._waiting: queue.Queue[Generation | None] = queue.Queue(_MAX_WAITING)
        self._verifier: Verifier | None = None  # of the answer being read
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="audits", daemon=True)
        self._thread.start()

    def begins(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its draw, and checked as such texts now are; what must stay here is not read elsewhere."""
        if (request.local_only or self._edge.is_local_only) and self._target.engine is None:
            return request
        plan = self._plan(request)
        is_chosen = bool(request.begun) or request.begun_is_prompt  # by somebody, which says nothing of the draft model
        may_be = plan.is_lossy and not is_chosen
        return replace(request, plan=plan, is_audited=may_be and self._draw() < self._share)

    def _plan(self, request: GenerateRequest) -> Plan:
        plan, checks = request.plan, _checks(request.plan)
        with self._lock:
            raised = {key[0]: each for key, each in self._watched.items() if each.is_raised and key[1] == checks}
        try:
            prompt = prompted(request, self._edge)[1].edge if raised else None
            draft = self._edge.adapters.choose(request.adapter, prompt.token_ids) if prompt else None
        except SkydraftError:  # the text says it itself
            return plan
        if draft and draft.adapter in raised and raised[draft.adapter].fingerprint == draft.fingerprint:
            return _stricter(plan).checking_start() if request.tools else _stricter(plan)  # as a gateway's plans do
        return plan

    def ended(self, request: GenerateRequest, generation: Generation | None, error: BaseException | None) -> None:
        if generation is None or not request.is_audited:
            return
        try:
            if not (error or self._is_closed) and generation.finish_reason and generation.token_ids:
                self._waiting.put_nowait(generation)
                return
        except queue.Full:
            with self._lock:
                self.counts["dropped"] += 1
        self._kept(generation, ())

    def _work(self) -> None:
        for generation in iter(self._waiting.get, None):
            audit = () if self._is_closed else self._read(generation)
            try:
                if audit:
                    self._note(generation, audit)
                self._kept(generation, audit)
            except Exception:
                log.exception("an audit was not kept")
            self._waiting.task_done()
        self._waiting.task_done()

    def _read(self, generation: Generation) -> Audit:
        """An ordinary verification, for which all tokens are skipped ones and the last one is the block."""
        (*before, last), prompt, edge = generation.token_ids, generation.prompts.target, generation.edge
        assert edge is not None  # it drafted
        request = replace(generation.request, plan=_READING, cache_scope="", traceparent="", num_best=None)
        context = Context(prompt)
        context.commit_skip(DraftBlock(0, tuple(before)), None)
        try:
            with closing(self._target.verifier(context, prompt, edge.vocab, request)) as self._verifier:
                if self._is_closed:
                    self._verifier.cancel()
                verdict = self._verifier.verify(DraftBlock(context.base, (last,)), context.catch_up)
        except Exception as error:
            self.counts["lost"] += 1
            log.info("an answer was not audited: %s", error, exc_info=not isinstance(error, SkydraftError))
            return ()
        return (*verdict.audit, verdict.num_accepted == 1)

    def _note(self, generation: Generation, audit: Audit) -> None:
        key, plan, edge = _key(generation), generation.request.plan, generation.edge
        assert edge is not None
        stricter = _stricter(plan)
        asked = None if stricter == plan else plan.gate.threshold if plan.verifies else ASKED
        self.counts["read"] += 1
        with self._lock:
            watched = self._watched.pop(key, None)
            if watched is None or watched.fingerprint != edge.fingerprint:
                watched = Watched(edge.fingerprint, asked)
            self._watched[key] = watched
            if len(self._watched) > _MAX_WATCHED:
                del self._watched[min(self._watched, key=lambda each: self._watched[each].is_raised)]
            is_alarm, figures = watched.note(audit), watched.figures(*key)
        if is_alarm:
            of = f" with {key[0]}" if key[0] else ""
            self._notify(
                f"What is drafted{of} agrees with the target less than the {asked:g} that was asked: "
                f"{figures.agreement:.3f} over the newest {figures.num_answers} audited answers. Such texts now have "
                f"the gate {stricter.gate}, not {plan.gate}."
            )

    def figures_of(self, generation: Generation) -> AuditFigures | None:
        """The figures of the answers that are drafted and checked as this one; None before the first was read."""
        return next((each for each in self.figures if (each.adapter, each.gate) == _key(generation)), None)

    @property
    def figures(self) -> list[AuditFigures]:
        with self._lock:
            return [watched.figures(*key) for key, watched in self._watched.items()]

    def finish(self) -> None:
        """Wait until all that waits was read."""
        self._waiting.join()

    def close(self) -> None:
        """End the reading; what waits is not read."""
        self._is_closed = True
        if (verifier := self._verifier) is not None:
            verifier.cancel()
        self._waiting.put(None)  # the thread makes room
        self._thread.join()


def _checks(plan: Plan) -> str:
    return f"{plan.gate} top:{plan.top}" if plan.top else str(plan.gate)


def _key(generation: Generation) -> tuple[str | None, str]:
    return generation.edge.adapter if generation.edge else None, _checks(generation.request.plan)


def _stricter(plan: Plan) -> Plan:
    """The default mode where nothing is checked; and what mode `answers` always checks, for a calibrated gate, too."""
    if not plan.verifies:
        return make_plan(DEFAULT_MODE)
    if plan.gate.kind != "calibrated":
        return plan
    rules = dict.fromkeys((*plan.gate.content_rules, *make_plan("answers").gate.content_rules))
    return replace(plan, gate=replace(plan.gate, content_rules=tuple(rules)))
