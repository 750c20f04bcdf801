"""Drafting ahead while a verdict is waited for: not a token of it may differ from what is drafted without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.preparing import Preparer, likeliest
from skydraft.decoding.target import LocalVerifier
from skydraft.engines.base import Engine
from skydraft.errors import EngineError
from skydraft.gating.gates import ThresholdGate
from skydraft.gating.risk import LearnedRisk
from skydraft.types import DraftBlock, Round, Signals, Verdict
from tests import toys


class SlowVerifier(LocalVerifier):
    """Does not answer before `until` is so, or two seconds have passed."""

    until: Callable[[], bool] = staticmethod(lambda: True)

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        deadline = time.monotonic() + 2
        while not self.until() and time.monotonic() < deadline:
            time.sleep(1e-4)
        return super().verify(block, catch_up)


def loop_of(
    draft: Engine, target: Engine, chosen: DecodingParams, plan: Plan, *, ahead: bool, wait: int = 8
) -> SpeculativeLoop:
    """A loop whose verifier lets the draft model prepare `wait` steps, or all that it wants to."""
    gate = ThresholdGate(plan.gate)
    drafter = Drafter(
        draft, toys.ASKED, chosen, chosen.max_new_tokens, ends_blocks=gate.is_unsure if plan.eager else None,
        with_signals=True, prepares=ahead,
    )  # fmt: skip
    verifier = SlowVerifier(target, toys.ASKED, chosen, max_rows=64, top=plan.top)
    k = plan.k or 5
    preparer = Preparer(drafter, LearnedRisk(), k) if ahead else None
    if preparer:
        thread = preparer._thread
        verifier.until = lambda: drafter._num_prepared >= wait or _is_idle(thread)
    return SpeculativeLoop(Context(toys.ASKED), drafter, gate, verifier, k, toys.VOCAB, preparer=preparer)


def _is_idle(thread: Any) -> bool:
    return thread._shutdown or (thread._work_queue.empty() and bool(thread._idle_semaphore._value))


def told(rounds: Seq[Round]) -> list[Any]:
    """What of rounds must not depend on what was drafted when."""
    return [(each.block, each.token_ids, each.origins, each.record.outcome, each.audit) for each in rounds]


PLANS = [make_plan(k=5), make_plan(k=1), make_plan("quality"), make_plan(gate="entropy:2", k=8, eager=True)]


@toys.law(30)
@given(toys.pairs(), toys.params(), st.sampled_from(PLANS), st.integers(0, 25))
def test_no_token_depends_on_what_was_drafted_ahead(
    pair: tuple[Any, Any], chosen: DecodingParams, plan: Plan, wait: int
) -> None:
    draft, target = pair
    found = []
    for ahead in (False, True):
        loop = loop_of(draft, target, chosen, plan, ahead=ahead, wait=wait)
        found.append(told(list(loop.rounds())))
        loop.close()
    assert found[0] == found[1]


def test_what_was_prepared_is_used_and_counted() -> None:
    draft, target = toys.toy(3, 0.4), toys.toy(3)
    for temperature in (0.0, 0.8):
        chosen = DecodingParams(max_new_tokens=60, temperature=temperature, seed=4, logit_bias=((toys.EOS, -100.0),))
        alone = loop_of(draft, target, chosen, make_plan(k=5), ahead=False)
        loop = loop_of(draft, target, chosen, make_plan(k=5), ahead=True, wait=100)
        plain, rounds = list(alone.rounds()), list(loop.rounds())
        prepared = sum(done.record.ahead.num_prepared for done in rounds)
        used = sum(done.record.ahead.num_used for done in rounds)
        drafted = sum(done.record.num_draft for done in rounds)
        # One guess a round: where the verdict is another one, nothing is ready.
        assert drafted > used > 0
        assert prepared > used
        # What was ready cost no forward; the forwards that are left are those of the other tokens.
        passes = sum(done.record.draft.num_passes for done in rounds)
        assert passes < sum(done.record.draft.num_passes for done in plain) - used / 2
        assert sum(done.record.ahead.hidden_ms for done in rounds) > 0
        assert not any(done.record.ahead.num_used for done in plain)
        loop.close()
        alone.close()


def test_likeliest_first() -> None:
    sure, unsure = Signals(0.01, 0.99, 0.995), Signals(4.0, 0.05, 0.1)
    block = DraftBlock(0, (1, 2, 3), (sure, unsure, sure))
    assert likeliest(block, LearnedRisk())[0] == 1
    assert likeliest(DraftBlock(0, (1, 2), (sure, sure)), LearnedRisk())[0] == 2
    ended = DraftBlock(0, (1, 2), (sure, sure), "stop", "eos")
    assert sorted(likeliest(ended, LearnedRisk())) == [0, 1]  # after the whole block there is nothing
    forced = DraftBlock(0, (1, 2), (sure, unsure), forced=(False, True))
    assert 1 not in likeliest(forced, LearnedRisk())


def test_others_are_let_in_before_anything_is_drafted_ahead() -> None:
    draft = toys.toy(1)
    drafter = Drafter(draft, toys.ASKED, DecodingParams(max_new_tokens=50), 50, prepares=True)
    context = Context(toys.ASKED)
    block = drafter.draft(context, 3)
    text = toys.array([*toys.PROMPT_IDS, *block.token_ids])
    with draft.floor:  # it does not wait for it
        assert drafter.prepare(text, 5, lambda: True) == ()
        assert drafter.runner_up(text[:-1], 2) == ()
    assert len(drafter.prepare(text, 5, lambda: True)) == 5
    assert drafter.prepare(text, 5, lambda: False) == ()
    assert drafter.runner_up(text[:-1], 2) not in ((), block.token_ids[2:])
    drafter.close()
    assert not drafter._ready
    with pytest.raises(EngineError):
        drafter.draft(context, 3)


def test_what_is_kept_ahead_is_bounded() -> None:
    drafter = Drafter(toys.toy(1), toys.ASKED, DecodingParams(max_new_tokens=500), 500, prepares=True)
    block = drafter.draft(Context(toys.ASKED), 3)
    assert len(drafter.prepare(toys.array([*toys.PROMPT_IDS, *block.token_ids]), 300, lambda: True)) == 48
    drafter.close()


def test_where_there_is_no_thread_nothing_is_drafted_ahead() -> None:
    draft, target = toys.toy(3, 0.4), toys.toy(3)
    chosen = DecodingParams(max_new_tokens=20)
    loop = loop_of(draft, target, chosen, make_plan(k=5), ahead=True)
    assert loop._preparer is not None
    loop._preparer._thread.shutdown()  # as the interpreter does at its end
    alone = loop_of(draft, target, chosen, make_plan(k=5), ahead=False)
    assert told(list(loop.rounds())) == told(list(alone.rounds()))
    for each in (loop, alone):
        each.close()


def test_closing_ends_the_thread_and_a_failure_ahead_is_not_a_failure() -> None:
    draft, target = toys.toy(5, 0.3, kind=toys.FlakyEngine), toys.toy(5)
    chosen = DecodingParams(max_new_tokens=30, logit_bias=((toys.EOS, -100.0),))
    want = [done.token_ids for done in loop_of(toys.toy(5, 0.3), target, chosen, make_plan(), ahead=False).rounds()]
    loop = loop_of(draft, target, chosen, make_plan(), ahead=True)
    rounds = loop.rounds()
    got = [next(rounds).token_ids]
    draft.fail_at = draft.num_asked + 2
    try:
        got += [done.token_ids for done in rounds]
    except EngineError:  # where the failure fell into a step that was needed, it is said
        got += [done.token_ids for done in loop.rounds()]
    assert got == want
    assert draft.num_asked >= draft.fail_at
    loop.close()
    deadline = time.monotonic() + 30
    while [thread for thread in threading.enumerate() if "drafting ahead" in thread.name]:
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("address, is_ahead", [("localhost:1", False), ("[::1]:1", False), ("10.0.0.7:1", False)])
def test_off_unless_asked_for(address: str, is_ahead: bool) -> None:
    import skydraft

    given = {"insecure": True}
    for asked, wanted in ((None, is_ahead), (True, True), (False, False)):
        cloud = skydraft.connect(address, work_ahead=asked, **given)  # type: ignore[arg-type]
        assert cloud.works_ahead == wanted
        cloud.close()
