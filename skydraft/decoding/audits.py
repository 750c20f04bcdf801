"""Audits: the target reads a share of the finished answers, and says which of their tokens it would have written."""

import logging
import queue
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace

from skydraft.config import DEFAULT_MODE
from skydraft.decoding.builder import prompted
from skydraft.decoding.context import Context
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import AuditFigures
from skydraft.decoding.target import Target, TargetFacts
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.types import DraftBlock

log = logging.getLogger("skydraft.decoding")

Audit = tuple[bool, ...]  # for each token of an answer: whether the target would have written it
ASKED = make_plan("auto").gate.threshold  # of texts that nothing checks; a calibrated gate names its own
_MAX_WAITING, _NEWEST = 16, 100  # answers
_MAX_WATCHED = 64  # clients may ask for any gate
_FACTS_S = 0.5
_READING = make_plan("fluency")  # exact, soon over where the cloud is gone, and no session is opened before it is read


class Watched:
    """The audits of answers that one draft model wrote and one gate checked.

    `note` bets on "they agree less than `asked`": each bet multiplies its capital by 1 + rate * (asked - share of the
    answer), so no capital is expected to grow while the mean, given all before, is at least `asked` (Waudby-Smith and
    Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024). A bet begins at each answer, the
    n-th with 1 / (n (n + 1)) of the money, since tasks may change after long agreement. By Ville's inequality an alarm
    is false with probability `alarm` at most, however long it runs; it comes where the upper bound of a confidence
    sequence of that level falls below `asked`.
    """

    def __init__(self, asked: float | None, adapter: str | None = None, gate: str = "", alarm: float = 0.01) -> None:
        self.asked, self.is_raised, self.of = asked, False, (adapter, gate)
        self._newest: deque[float] = deque(maxlen=_NEWEST)  # the share of each that the target would have written
        self._rates = [] if asked is None or asked >= 1 else [share / (1 - asked) for share in (0.1, 0.3, 0.6)]
        self._capital, self._num, self._limit = [0.0] * len(self._rates), 0, len(self._rates) / alarm

    def note(self, audit: Audit) -> bool:
        """Take in the next answer; returns whether that is the alarm."""
        share = sum(audit) / len(audit)
        self._newest.append(share)
        if self.asked is None or self.is_raised:
            return False
        self._num += 1
        won, begun = self.asked - share, 1 / (self._num * (self._num + 1))
        bets = zip(self._capital, self._rates, strict=True)
        self._capital = [(capital + begun) * (1 + rate * won) for capital, rate in bets]
        self.is_raised = bool(self._rates) and sum(self._capital) >= self._limit
        return self.is_raised

    @property
    def figures(self) -> AuditFigures:
        mean = sum(self._newest) / len(self._newest)  # which the bets are about
        return AuditFigures(*self.of, round(mean, 4), len(self._newest), self.asked, self.is_raised)


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
        self._watched: dict[tuple[str, str], Watched] = {}  # by the draft model's fingerprint and gate, newest last
        self._left_out = set[str]()  # adapters that have no calibration, so that their texts are drafted without them
        self._weights = ""  # of the target that read
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
        if any(message.audio for message in request.messages):
            return request  # an audit would send speech that the answer needs nobody to hear, or not hear it
        request = self._checked(request)
        is_chosen = bool(request.begun) or request.begun_is_prompt  # by somebody, which says nothing of the draft model
        is_audited = request.plan.is_lossy and not is_chosen and self._draw() < self._share
        return replace(request, is_audited=is_audited)

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        gate, plan = _checks(request.plan), _stricter(request.plan)
        if self._raised(gate):  # then it may be that nothing is read any more
            with suppress(SkydraftError):
                self._meet(self._target.facts(_FACTS_S))
        if not (raised := self._raised(gate)):
            return request
        try:
            prompt = prompted(request, self._edge)[1].edge
            draft = self._edge.adapters.choose(request.adapter, prompt.token_ids)
        except SkydraftError:  # the text says it itself
            return request
        is_left_out = draft.fingerprint in self._left_out and plan.gate.kind == "calibrated"
        if (self._edge if is_left_out else draft).fingerprint not in raised:
            return request
        # What was learned wrongly is certain, and no gate sees it; limits were fitted to the adapter, and are its own.
        adapter = request.adapter if request.plan.verifies else "none"
        return replace(request, plan=plan, adapter=adapter)

    def _raised(self, gate: str) -> set[str]:
        """The fingerprints of draft models that agree too little with this gate."""
        with self._lock:
            return {draft for (draft, of), each in self._watched.items() if each.is_raised and of == gate}

    def ended(self, generation: Generation) -> None:
        if not generation.request.is_audited:
            return
        if not (generation.finish_reason and generation.token_ids and self._takes(generation)):
            self._kept(generation, ())

    def _takes(self, generation: Generation) -> bool:
        """Let it be read; False where too many wait, or nothing is read any more."""
        with self._lock:  # `close` comes before this or after it: else it would be neither read nor kept
            if not self._is_closed:
                with suppress(queue.Full):
                    self._waiting.put_nowait(generation)
                    return True
                self.counts["dropped"] += 1
        return False

    def _work(self) -> None:
        for generation in iter(self._waiting.get, None):
            audit = () if self._is_closed else self._read(generation)
            try:
                if audit and not generation.stats.num_fallback_tokens:  # no gate asked for these
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
        context = Context(prompt)
        context.commit_skip(DraftBlock(0, tuple(before)), None)
        try:
            given = replace(generation.request, plan=_READING, calibration=None, num_best=None)
            request = replace(given, cache_scope="")
            with closing(self._target.verifier(context, prompt, edge.vocab, request)) as self._verifier:
                if self._is_closed:
                    self._verifier.cancel()
                verdict = self._verifier.verify(DraftBlock(context.base, (last,)), context.catch_up)
            facts = self._target.facts(_FACTS_S)
        except Exception as error:
            self.counts["lost"] += 1
            log.info("an answer was not audited: %s", error, exc_info=not isinstance(error, SkydraftError))
            return ()
        self.counts["read"] += 1
        self._meet(facts)
        return (*verdict.audit, verdict.num_accepted == 1)

    def _meet(self, facts: TargetFacts | None) -> None:
        """What another target said says nothing of this one."""
        with self._lock:
            if facts and facts.weights != self._weights:
                self._watched = {} if self._weights else self._watched  # it may answer late who it is
                self._weights = facts.weights

    def _note(self, generation: Generation, audit: Audit) -> None:
        plan, edge = generation.request.plan, generation.edge
        assert edge is not None
        if plan.gate.kind == "calibrated":
            with suppress(SkydraftError):  # it may be gone by now
                chosen = self._edge.adapters.choose(generation.request.adapter, generation.prompts.edge.token_ids)
                (self._left_out.discard if chosen is edge else self._left_out.add)(chosen.fingerprint)
        gate, stricter = _checks(plan), _stricter(plan)
        asked = None if stricter == plan else plan.gate.threshold if plan.verifies else ASKED
        with self._lock:
            watched = self._watched.pop((edge.fingerprint, gate), None) or Watched(asked, edge.adapter, gate)
            taught_anew = [key for key, each in self._watched.items() if each.of == watched.of and not each.is_raised]
            for key in taught_anew:  # under its name
                del self._watched[key]
            self._watched[edge.fingerprint, gate] = watched
            if len(self._watched) > _MAX_WATCHED:
                ranks = {key: (each.is_raised, each.asked is not None) for key, each in self._watched.items()}
                del self._watched[min(ranks, key=ranks.__getitem__)]
            is_alarm, figures = watched.note(audit), watched.figures
        if is_alarm:
            of, then = (f" with {edge.adapter}", "are drafted without it, and ") if edge.adapter else ("", "")
            self._notify(
                f"What is drafted{of} agrees with the target less than the {asked:g} that was asked: "
                f"{figures.agreement:.3f} over the newest {figures.num_answers} audited answers. "
                f"Such texts now {'' if plan.verifies else then}have the gate {stricter.gate}, not {plan.gate}."
            )

    def figures_of(self, generation: Generation) -> AuditFigures | None:
        """The figures of the answers that are drafted and checked as this one; None before the first was read."""
        with self._lock:
            watched = self._watched.get((getattr(generation.edge, "fingerprint", ""), _checks(generation.request.plan)))
            return watched.figures if watched else None

    @property
    def figures(self) -> list[AuditFigures]:
        with self._lock:
            return [watched.figures for watched in self._watched.values()]

    def finish(self) -> None:
        """Wait until all that waits was read."""
        self._waiting.join()

    def close(self) -> None:
        """End the reading; what waits is not read."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            for waits in (self._target, self._verifier):  # a target in this process is never waited for
                if cancel := getattr(waits, "cancel", None):
                    cancel()
            self._waiting.put(None)  # the thread makes room
        self._thread.join()


def _checks(plan: Plan) -> str:
    return f"{plan.gate} top:{plan.top}" if plan.top else str(plan.gate)


def _stricter(plan: Plan) -> Plan:
    """The default mode where nothing is checked; and what mode `answers` always checks, for a calibrated gate, too."""
    if not plan.verifies:
        return make_plan(DEFAULT_MODE)
    if plan.gate.kind != "calibrated":
        return plan
    rules = dict.fromkeys((*plan.gate.content_rules, *make_plan("answers").gate.content_rules))
    return replace(plan, gate=replace(plan.gate, content_rules=tuple(rules)))
