"""Audits: the target reads a share of the finished answers, and says which of their tokens it would have written."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

from skydraft.config import DEFAULT_MODE
from skydraft.decoding.builder import prompts_of
from skydraft.decoding.context import Context
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import AuditFigures
from skydraft.decoding.target import Target
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, SkydraftError
from skydraft.types import DraftBlock

log = logging.getLogger("skydraft.decoding")

Audit = tuple[bool, ...]  # for each token of an answer: whether the target would have written it
ASKED = make_plan("auto").gate.threshold  # of texts that are not checked; a calibrated gate names its own
_MAX_WAITING = 16  # answers
_NEWEST = 100  # answers
_MAX_WATCHED = 64  # clients may ask for any gate
_READING = make_plan(DEFAULT_MODE)  # exact, and soon over where the cloud is gone


class Bets:
    """Tells that answers agree less than `asked` on average: a betting martingale over the share of each answer.

    Each bet multiplies its capital by 1 + rate * (asked - share), so while the mean, given all before, is at least
    `asked`, no capital is expected to grow (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", JRSS B 2024). One begins at each answer, the n-th with 1 / (n (n + 1)) of the money, since tasks change
    after long agreement. By Ville's inequality an alarm is false with probability `alarm` at most, however long it
    runs; equally, that is when the upper bound of a confidence sequence of that level falls below `asked`.
    """

    def __init__(self, asked: float, alarm: float = 0.01) -> None:
        self._asked, self._limit = asked, 1 / alarm
        self._rates = [share / (1 - asked) for share in (0.1, 0.3, 0.6)] if asked < 1 else [1.0]
        self._capital = [0.0] * len(self._rates)
        self._num = 0

    def lose(self, share: float) -> bool:
        """Take in the share of the next answer that agrees; returns whether that is an alarm."""
        self._num += 1
        begun = 1 / (self._num * (self._num + 1))
        factors = [1 + rate * (self._asked - share) for rate in self._rates]
        self._capital = [(each + begun) * factor for each, factor in zip(self._capital, factors, strict=True)]
        return sum(self._capital) / len(self._capital) + 1 / (self._num + 1) >= self._limit


@dataclass(eq=False, slots=True)
class _Watched:
    """Answers that one adapter drafted and one gate checked; a model with another fingerprint begins anew."""

    fingerprint: str
    asked: float | None
    bets: Bets | None
    newest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NEWEST))  # agreed, of so many
    is_raised: bool = False


class Auditor:
    """An observer that lets `target` read `share` of the finished answers by `edge`, in a thread of its own.

    Which ones is drawn before they begin. Where the agreement falls below what was asked, later texts are checked more,
    and `notify` gets a line. `kept` gets each answer that was drawn, with its audit; an empty one if there is none.
    Raises OptionError for a share that is none.
    """

    def __init__(
        self, edge: Engine, target: Target, share: float, *, notify: Callable[[str], None],
        kept: Callable[[Generation, Audit], object] = lambda generation, audit: None,
        draw: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        if not 0 < share <= 1:
            raise OptionError(f"--audit-share must be above 0 and at most 1, not {share:g}.")
        self._edge, self._target, self._share = edge, target, share
        self._notify, self._kept, self._draw = notify, kept, draw
        self.counts = Counter[str](read=0, lost=0, dropped=0)  # lost: the target was; dropped: too many waited
        self._watched: dict[tuple[str | None, str], _Watched] = {}  # by adapter and gate, the newest last
        self._lock = threading.Lock()  # for these two
        self._waiting: queue.Queue[Generation | None] = queue.Queue(_MAX_WAITING)
        self._verifier: Verifier | None = None  # of the answer being read
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="audits", daemon=True)
        self._thread.start()

    def begins(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its draw, and checked as its texts now are. What must stay here is not read elsewhere."""
        stays = request.local_only or self._edge.is_local_only
        if stays and self._target.engine is None:
            return request
        request = replace(request, plan=self._plan_for(request))
        return replace(request, is_audited=request.plan.is_lossy and self._draw() < self._share)

    def _plan_for(self, request: GenerateRequest) -> Plan:
        plan = request.plan
        with self._lock:
            raised = {adapter: each for (adapter, gate), each in self._watched.items() if each.is_raised
                      and gate == _checks(plan)}  # fmt: skip
        if not raised:
            return plan
        try:
            prompt = prompts_of(request, self._edge).edge
            draft = self._edge.adapters.choose(request.adapter, prompt.token_ids)
        except SkydraftError:  # the text says it itself
            return plan
        watched = raised.get(draft.adapter)
        if watched is None or watched.fingerprint != draft.fingerprint:
            return plan
        return _stricter(plan).checking_start() if request.tools else _stricter(plan)  # as a gateway's own plans do

    def ended(self, request: GenerateRequest, generation: Generation | None, error: BaseException | None) -> None:
        if generation is None or not request.is_audited:
            return
        if error is None and generation.finish_reason is not None and generation.token_ids and not self._is_closed:
            try:
                self._waiting.put_nowait(generation)
                return
            except queue.Full:
                self._count("dropped")
        self._kept(generation, ())

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def _work(self) -> None:
        while (generation := self._waiting.get()) is not None:
            audit: Audit = ()
            try:
                if not self._is_closed:
                    audit = self._read(generation)
                    self._note(generation, audit)
                self._kept(generation, audit)
            except SkydraftError as error:
                self._count("lost")
                log.info("an answer was not audited: %s", error.line)
                self._kept(generation, ())
            except Exception:
                log.exception("an audit failed")
            self._waiting.task_done()

    def _read(self, generation: Generation) -> Audit:
        """An ordinary verification, for which all tokens are skipped ones and the last one is the block."""
        *before, last = generation.token_ids
        edge, prompt = generation.edge, generation.prompts.target
        assert edge is not None  # it drafted
        request = replace(generation.request, plan=_READING, cache_scope="", traceparent="", num_best=None)
        context = Context(prompt)
        context.commit_skip(DraftBlock(0, tuple(before)), None)
        with closing(self._target.verifier(context, prompt, edge.vocab, request)) as self._verifier:
            if self._is_closed:
                self._verifier.cancel()
            verdict = self._verifier.verify(DraftBlock(context.base, (last,)), context.catch_up)
        return (*verdict.audit, verdict.num_accepted == 1)

    def _note(self, generation: Generation, audit: Audit) -> None:
        edge, plan, key = generation.edge, generation.request.plan, _key(generation)
        assert edge is not None
        with self._lock:
            self.counts["read"] += 1
            watched = self._watched.pop(key, None)
            if watched is None or watched.fingerprint != edge.fingerprint:
                asked = _asked(plan)
                watched = _Watched(edge.fingerprint, asked, None if asked is None else Bets(asked))
            self._watched[key] = watched
            watched.newest.append((sum(audit), len(audit)))
            if len(self._watched) > _MAX_WATCHED:
                del self._watched[min(self._watched, key=lambda each: self._watched[each].is_raised)]
            if watched.is_raised or watched.bets is None or not watched.bets.lose(sum(audit) / len(audit)):
                return
            watched.is_raised = True
            figures = _figures(key, watched)
        of, stricter = f" with {figures.adapter}" if figures.adapter else "", _stricter(plan)
        self._notify(
            f"What is drafted{of} agrees with the target less than the {figures.asked:g} that was asked: "
            f"{figures.agreement:.3f} over the newest {figures.num_answers} audited answers. Such texts are now checked "
            f"by the gate {stricter.gate}, not {plan.gate}."
        )

    def figures_of(self, generation: Generation) -> AuditFigures | None:
        """The figures of the answers that are drafted and checked as this one; None before the first was read."""
        with self._lock:
            watched = self._watched.get(key := _key(generation))
            return _figures(key, watched) if watched else None

    @property
    def figures(self) -> list[AuditFigures]:
        with self._lock:
            return [_figures(*each) for each in self._watched.items()]

    def finish(self) -> None:
        """Wait until all that waits was read."""
        self._waiting.join()

    def close(self) -> None:
        """End the reading; what waits is not read. Generations may end later, and are not read."""
        if self._is_closed:
            return
        self._is_closed = True
        if (verifier := self._verifier) is not None:
            verifier.cancel()
        self._waiting.put(None)  # the thread makes room
        self._thread.join()


def _checks(plan: Plan) -> str:
    return f"{plan.gate} top:{plan.top}" if plan.top else str(plan.gate)


def _key(generation: Generation) -> tuple[str | None, str]:
    return generation.edge.adapter if generation.edge else None, _checks(generation.request.plan)


def _asked(plan: Plan) -> float | None:
    """The agreement that was asked for; None where none was, or nothing more is to be checked."""
    if _stricter(plan) == plan:
        return None
    return plan.gate.threshold if plan.verifies else ASKED


def _stricter(plan: Plan) -> Plan:
    """The default mode where nothing is checked. A calibrated gate checks what mode `answers` always checks, too."""
    if not plan.verifies:
        return make_plan(DEFAULT_MODE)
    if plan.gate.kind != "calibrated":
        return plan
    rules = dict.fromkeys((*plan.gate.content_rules, *make_plan("answers").gate.content_rules))
    return replace(plan, gate=replace(plan.gate, content_rules=tuple(rules)))


def _figures(key: tuple[str | None, str], watched: _Watched) -> AuditFigures:
    agreed, whole = (sum(each) for each in zip(*watched.newest, strict=True))
    return AuditFigures(*key, round(agreed / whole, 4), len(watched.newest), watched.asked, watched.is_raised)
