"""What an error of a server means for a text: `recover`, as a table; and what is slow, stopped or broken for a moment
is not gone, and nothing is left behind.
"""

import asyncio
import signal
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, errors, make_plan
from skydraft.edge.channel import Waits
from skydraft.edge.recovery import FALLBACK_S, Recovery, Situation, Step, recover
from skydraft.edge.verifier import waiting_for
from skydraft.errors import (
    BaseMismatch,
    CloudBusy,
    CloudFailure,
    CloudLost,
    RateLimited,
    SessionNotFound,
    SkydraftError,
)

from ..cloud.driver import slow_toy
from ..protocol.test_errors import descendants
from ..serving import PATIENCE_S, free_port, serving
from .conftest import ALONE, PARAMS, Start, begin, script, undisturbed

TIMEOUT_S, EDGE_S = 30.0, 1.0  # a gated text goes on alone within a second
ONE, MANY, GATED = Situation(TIMEOUT_S), Situation(TIMEOUT_S, has_others=True), Situation(TIMEOUT_S, falls_back=True)

# What is done first: with one server, with another one that was not tried, with one server where the text may go on
# alone.
BY_STEPS: dict[tuple[Step, Step, Step], tuple[type[SkydraftError], ...]] = {
    ("again", "again", "again"): (CloudBusy, errors.CloudTimeout, RateLimited),
    ("open again",) * 3: (BaseMismatch, CloudFailure, errors.Diverged, SessionNotFound, errors.SessionTaken),
    ("reconnect", "elsewhere", "reconnect"): (errors.CloudDraining, errors.CloudLoading, CloudLost),
    ("give up", "give up", "alone"): (errors.LimitExceeded, errors.BrokenOff, errors.BudgetSpent),
    ("give up", "elsewhere", "give up"): (
        errors.NotAuthorized, errors.TargetChanged, errors.TlsFailure, errors.VocabularyMismatch,
    ),
}  # fmt: skip
MENDED = {kind: steps for steps, kinds in BY_STEPS.items() for kind in kinds}
# What no other try and no other server would make better, or what no server of ours sends.
FINAL = [kind for kind in descendants(SkydraftError) if kind not in MENDED]


@pytest.mark.parametrize("kind", MENDED)
def test_what_is_done_first(kind: type[SkydraftError]) -> None:
    assert tuple(recover(kind("no."), each).step for each in (ONE, MANY, GATED)) == MENDED[kind]


@pytest.mark.parametrize("kind", FINAL)
def test_nothing_else_is_tried_again(kind: type[SkydraftError]) -> None:
    for now in (ONE, MANY, GATED):
        assert recover(kind("no."), now) == Recovery("give up")


LOST, BUSY, GONE, BROKEN = CloudLost("no."), CloudBusy("no."), SessionNotFound("no."), CloudFailure("no.")
LIMITED = RateLimited("no.", retry_after_s=1.5)


@pytest.mark.parametrize(("error", "now", "then"), [
    # Pauses double up to a second, and are no longer than the time that is left.
    (BUSY, ONE, Recovery("again", 0.02)),
    (BUSY, replace(ONE, num_tries=3, waited_s=1), Recovery("again", 0.16)),
    (BUSY, replace(ONE, num_tries=9, waited_s=28.9), Recovery("again", 1.0)),
    (BUSY, replace(ONE, num_tries=9, waited_s=29.1), Recovery("give up", is_late=True)),
    (LOST, replace(ONE, num_tries=9, waited_s=29.5, silent_s=29.5), Recovery("reconnect", 0.5)),
    (LOST, replace(ONE, num_tries=9, waited_s=30, silent_s=30), Recovery("give up", is_late=True)),
    # A limit says itself when to ask again; never at once.
    (LIMITED, ONE, Recovery("again", 1.5)),
    (RateLimited("no.", retry_after_s=0.0), ONE, Recovery("again", 0.02)),
    (LIMITED, replace(ONE, waited_s=29), Recovery("give up", is_late=True)),
    # A gated text waits for a server that is busy, but not for a silent one, nor long for one that limits it.
    (BUSY, replace(GATED, num_tries=9, waited_s=9), Recovery("again", 1.0)),
    (LIMITED, GATED, Recovery("alone", is_late=True)),
    (RateLimited("no.", retry_after_s=0.3), GATED, Recovery("again", 0.3)),
    (RateLimited("no.", retry_after_s=0.3), replace(GATED, waited_s=0.8), Recovery("alone", is_late=True)),
    (LOST, replace(GATED, num_tries=2, waited_s=0.3, silent_s=0.3), Recovery("reconnect", 0.08)),
    (LOST, replace(GATED, num_tries=4, waited_s=0.4, silent_s=0.4), Recovery("alone", is_late=True)),
    (errors.CloudTimeout("no."), replace(GATED, waited_s=0.7, silent_s=0.7), Recovery("alone", is_late=True)),
    (errors.CloudDraining("no."), replace(GATED, waited_s=0.7, silent_s=0.7), Recovery("alone", is_late=True)),
    # The first opening again is at once; each of them feeds the prompt again.
    (GONE, ONE, Recovery("open again")),
    (GONE, replace(ONE, num_tries=1), Recovery("open again", 0.04)),
    # The next server is asked at once, while there is one.
    (LOST, replace(MANY, falls_back=True, waited_s=0.7, silent_s=0.7), Recovery("elsewhere")),
    (LOST, replace(MANY, falls_back=True, waited_s=1.1, silent_s=1.1), Recovery("alone", is_late=True)),
    # A server that fails is tried twice more; where there is another, once there.
    (BROKEN, ONE, Recovery("open again", 0.02)),
    (BROKEN, replace(ONE, num_tries=1, num_failures=1), Recovery("open again", 0.04)),
    (BROKEN, replace(ONE, num_failures=2), Recovery("give up")),
    (BROKEN, replace(GATED, num_failures=2), Recovery("alone")),
    (BROKEN, replace(MANY, num_failures=1), Recovery("elsewhere")),
    # What no server would take ends the help for good, and a token that is refused is no outage.
    (errors.LimitExceeded("no."), GATED, Recovery("alone", is_final=True)),
])  # fmt: skip
def test_what_is_done_then(error: SkydraftError, now: Situation, then: Recovery) -> None:
    found = recover(error, now)
    assert (found.step, found.is_late, found.is_final) == (then.step, then.is_late, then.is_final)
    assert found.pause_s == pytest.approx(then.pause_s)


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("timeout_s", [0.2, TIMEOUT_S])
def test_a_gated_text_waits_for_a_silent_server_less_than_a_second(timeout_s: float, has_others: bool) -> None:
    """Its last try begins before FALLBACK_S, or the rest of a watch and a ping is still under way."""
    waiting = waiting_for(timeout_s, falls_back=True, has_others=has_others)
    silence_s = waiting.quick_s + waiting.ping_s
    assert silence_s < EDGE_S and waiting.timeout_s == timeout_s
    now = Situation(timeout_s, falls_back=True, num_tries=1, waited_s=silence_s, silent_s=silence_s)
    if not has_others:
        assert recover(LOST, now).step == "alone"  # no second silence is begun
    assert FALLBACK_S < EDGE_S


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", [kind for kind, steps in MENDED.items() if steps[0] != "give up"])
def test_an_error_that_goes_on_ends_in_time(kind: type[SkydraftError], gated: bool) -> None:
    """Played through, with answers that take no time: never without a pause twice, and never beyond the timeout."""
    now, pauses, is_silent = Situation(TIMEOUT_S, falls_back=gated), list[float](), issubclass(kind, CloudLost)
    while (found := recover(kind("no."), now)).step not in ("give up", "alone"):
        pauses.append(found.pause_s)
        now.num_tries, now.waited_s, now.silent_s = len(pauses), sum(pauses), sum(pauses) * is_silent
        now.num_failures = len(pauses) * (kind is CloudFailure)
    assert found.step == ("alone" if gated else "give up") and found.is_late == (kind is not CloudFailure)
    assert now.waited_s <= (EDGE_S if gated and is_silent else TIMEOUT_S)
    assert len(pauses) < 60 and pauses.count(0.0) <= 1


@pytest.mark.parametrize("plan", ["k=4", "'cloud'"])
def test_an_edge_that_was_stopped_for_longer_than_it_waits_keeps_its_text(plan: str) -> None:
    does = "print('begun', flush=True); list(rounds); print(*generation.token_ids)"
    with serving(slow_toy(0.2)) as server:
        program = script(server.address, plan, does, length=16, timeout_s=1.0)
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as edge:
            assert edge.stdout is not None and edge.stdout.readline() == "begun\n"
            for _ in range(2):
                edge.send_signal(signal.SIGSTOP)
                time.sleep(1.4)
                edge.send_signal(signal.SIGCONT)
                time.sleep(0.2)
            out, err = edge.communicate(timeout=PATIENCE_S)
    token_ids = undisturbed(params=replace(PARAMS, max_new_tokens=16, min_new_tokens=16))
    assert (edge.returncode, err, out) == (0, "", " ".join(map(str, token_ids)) + "\nover\n")


@pytest.mark.parametrize("plan", [ALONE, make_plan("lossless")], ids=["cloud", "lossless"])
def test_a_reader_who_takes_its_time_is_no_silence_of_the_cloud(start: Start, plan: Any) -> None:
    server, many = start(port=free_port()), DecodingParams(max_new_tokens=1000, min_new_tokens=1000)
    with closing(skydraft.connect(server.address, timeout_s=1, require=True)) as cloud:
        generation = begin(cloud, plan, many)
        next(rounds := generation.rounds())
        server.stop()
        start(port=server.port)
        time.sleep(1.5)
        assert sum(1 for _ in rounds) and len(generation.token_ids) == 1000


def test_an_interrupt_or_a_failing_line_ends_what_was_waited_for() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.set()

    def late() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Waits().run(work(), 0.05, late)
    assert ended.wait(1.0)
