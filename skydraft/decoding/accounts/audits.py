"""Audits: the target reads a share of the finished answers, and marks the tokens that it would have written."""

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

from skydraft.decoding.accounts.stats import AuditFigures
from skydraft.decoding.context import Context
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import Target
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Engine, Seats
from skydraft.errors import SkydraftError
from skydraft.types import DraftBlock

log = logging.getLogger("skydraft.decoding")

Audit = tuple[bool, ...]  # for each token of an answer: whether the target would have written it
_Of = tuple[str, str | None, str, float | None]  # the draft model's fingerprint, its adapter, gate, requested agreement
_AUTO, _READING = make_plan("auto"), make_plan("fluency")  # reading uses a plan that gives up soon without the cloud
_MAX_WAITING, _NEWEST, _ENOUGH = 16, 100, 40  # answers
_MAX_WATCHED = 64  # bounded, since clients may choose any gate


class Auditor:
    """An observer that lets `target` read `share` of the answers by `edge` once they are finished, in its own thread.

    Answers are drawn before they begin. `notify` gets one line if the answers of an adapter and gate agree less than
    requested. `kept` gets each drawn answer with its audit, empty if there is none.
    """

    def __init__(
        self, edge: Engine, target: Target, share: float, notify: Callable[[str], None],
        kept: Callable[[Generation, Audit], object] = lambda generation, audit: None,
        draw: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._edge, self._target, self._share = edge, target, share
        self._notify, self._kept, self._draw = notify, kept, draw
        self.counts = Counter(read=0, lost=0, dropped=0)  # lost: an error; dropped: unfinished, or too many waited
        self._shares: dict[_Of, tuple[float, ...]] = {}  # the agreement of each of the newest answers
        self._told = set[_Of]()
        self._thread, self._room = ThreadPoolExecutor(1, "audits"), threading.Semaphore(_MAX_WAITING)
        self._verifier: Verifier | None = None  # of the answer being read
        self._seats = Seats(())  # its place on the target
        self._is_closed = False

    def begins(self, request: GenerateRequest) -> bool:
        """Draw whether to audit a text. Texts that must stay on this device are never sent to a server."""
        stays = (request.local_only or self._edge.is_local_only) and self._target.engine is None
        # Speech may have stayed here, or only one model heard it. A fixed beginning says nothing about the model.
        is_unfit = any(message.audio for message in request.messages) or request.begun or request.begun_is_prompt
        return request.plan.is_lossy and not stays and not is_unfit and self._draw() < self._share

    def ended(self, generation: Generation) -> None:
        if not generation.is_audited:
            return
        if generation.finish_reason and generation.token_ids:
            if self._room.acquire(blocking=False):
                with suppress(RuntimeError):  # it is closed
                    self._thread.submit(self._audit, generation)
                    return
            self.counts["dropped"] += 1
        self._kept(generation, ())

    def _audit(self, generation: Generation) -> None:
        self._room.release()
        audit = () if self._is_closed else self._read(generation)
        try:
            if audit and not generation.stats.num_fallback_tokens:  # fallback tokens say nothing about the gate
                self._note(_of(generation), sum(audit) / len(audit))
            self._kept(generation, audit)
        except Exception:
            log.exception("an audit was not kept")

    def _read(self, generation: Generation) -> Audit:
        """Verify the answer as usual: all tokens but the last are skipped ones, and the last is the block."""
        (*before, last), edge = generation.token_ids, generation.edge
        assert edge is not None  # it drafted
        context = Context(generation.request.prompts.target)
        context.commit_skip(DraftBlock(0, tuple(before)), None)
        seats = self._seats = Seats((self._target.engine,))
        try:
            request = replace(generation.request, plan=_READING, calibration=None, num_best=None, cache_scope="")
            with closing(self._target.verifier(context, edge.vocab, request)) as self._verifier:
                if self._is_closed or not seats.take(len(context.token_ids)):
                    self._verifier.cancel()
                verdict = self._verifier.verify(DraftBlock(context.base, (last,)), context.catch_up)
        except Exception as error:
            self.counts["lost"] += 1
            log.info("an answer was not audited: %s", error, exc_info=not isinstance(error, SkydraftError))
            return ()
        finally:
            seats.give_back()
        self.counts["read"] += 1
        return (*verdict.audit, verdict.num_accepted == 1)

    def _note(self, of: _Of, share: float) -> None:
        if of not in self._shares and len(self._shares) == _MAX_WATCHED:
            del self._shares[min(self._shares, key=lambda each: len(self._shares[each]))]
        self._shares[of] = (*self._shares.get(of, ()), share)[-_NEWEST:]
        figures = _figures(of, self._shares[of])
        if figures.num_answers < _ENOUGH or figures.agreement >= (figures.asked or 0) or of in self._told:
            return
        self._told.add(of)
        who = f"Adapter {figures.adapter}" if figures.adapter else "Draft model"
        found = f"agreement {figures.agreement:g} over the last {figures.num_answers} audited answers"
        self._notify(f"{who}, gate {figures.gate}: {found}, below the {figures.asked:g} asked for.")

    def figures_of(self, generation: Generation) -> AuditFigures | None:
        """Return the figures of answers drafted and checked like this one; None before the first audit."""
        shares = self._shares.get(of := _of(generation))
        return _figures(of, shares) if shares else None

    @property
    def figures(self) -> list[AuditFigures]:
        """Figures for each adapter and gate. For a retrained adapter only the newest version counts."""
        newest = {of[1:]: _figures(of, shares) for of, shares in list(self._shares.items())}
        return list(newest.values())

    def finish(self) -> None:
        """Wait until all waiting answers were read."""
        with suppress(RuntimeError):  # it is closed
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Stop; waiting answers are not read."""
        self._is_closed = True
        self._seats.end_wait()
        if self._verifier:
            self._verifier.cancel()
        self._thread.shutdown()


def _of(generation: Generation) -> _Of:
    gate, edge = generation.request.plan.gate, generation.edge
    asked = {"calibrated": gate.threshold, "never": _AUTO.gate.threshold}.get(gate.kind)
    return getattr(edge, "fingerprint", ""), getattr(edge, "adapter", None), str(gate), asked


def _figures(of: _Of, shares: tuple[float, ...]) -> AuditFigures:
    return AuditFigures(*of[1:], round(sum(shares) / len(shares), 3), len(shares))
