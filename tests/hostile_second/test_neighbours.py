"""What one client may ask costs the others next to nothing: neither by long lists, nor by rules, nor by numbers."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from skydraft.choosing.constraints import no_repeat_ngram
from skydraft.cloud.jobs import GenerateJob, VerifyJob
from skydraft.edge.link import Link, LinkOptions
from skydraft.errors import LimitExceeded, SessionTaken
from skydraft.protocol import codec
from skydraft.protocol.values import Opening, SessionCall, VerifyCall
from skydraft.types import Prompt

from .. import toys
from ..cloud.worker_by_hand import ENDLESS, Desk, Watched
from ..serving import PATIENCE_S, serving
from ..toys import VOCAB

FINGERPRINT = codec.short_fingerprint(VOCAB.fingerprint)


def test_who_waits_for_a_seat_is_looked_at_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One label at its limit of seats lets 100 requests wait: each step looks at one of them, and at no id twice."""
    desk = Desk(toys.toy(4, kind=Watched), sessions_per_token=1)  # type: ignore[arg-type]
    desk.ask(SessionCall(1, 0, Opening(FINGERPRINT, Prompt((1,)), params=ENDLESS)), "eve", GenerateJob)
    desk.step()
    for number in range(2, 102):
        opening = Opening(FINGERPRINT, Prompt((1,)))
        desk.ask(VerifyCall(number, 0, 3, (2, 2, 2), (), 0, opening), "eve", VerifyJob)
    desk.step()
    looks = {"admit": 0, "check_ids": 0}

    def counting(name: str) -> Any:
        plain = getattr(desk.worker._docket.sessions, name)

        def counted(*args: Any) -> Any:
            looks[name] += 1
            return plain(*args)

        return counted

    for name in looks:
        monkeypatch.setattr(desk.worker._docket.sessions, name, counting(name))
    desk.step(10)
    assert looks["admit"] <= 10 and looks["check_ids"] == 0


def test_a_number_that_somebody_else_works_on_is_taken_and_not_waited_for() -> None:
    """Two owners have drawn the same number: the second is told at once, however long the first one's stream is."""
    desk = Desk(toys.toy(4, kind=Watched))  # type: ignore[arg-type]
    call = SessionCall(5, 0, Opening(FINGERPRINT, Prompt((1, 2)), params=ENDLESS))
    desk.ask(call, "eve", GenerateJob)
    desk.step()
    asked = desk.ask(VerifyCall(5, 0, 0, (), (), 0, Opening(FINGERPRINT, Prompt((1,)))), "ann", VerifyJob)
    desk.step(2)
    assert asked.is_answered and isinstance(asked.last, SessionTaken)


def test_a_long_ngram_costs_no_more_than_its_length() -> None:
    """A prefix that is one token over and over, and a ban of 1,024 tokens: it was compared 1,023 times for each row."""

    def row_s(size: int) -> float:
        ban, prefix = no_repeat_ngram(size), np.full(3200, 7, np.int32)
        ban(prefix[:3000])  # of the past, once
        began = time.process_time()
        for length in range(3000, 3200):
            ban(prefix[:length])
        return time.process_time() - began

    assert min(row_s(1024) for _ in range(3)) < 30 * min(row_s(2) for _ in range(3))


def test_lists_longer_than_the_context_are_refused_before_they_are_read() -> None:
    """250,000 ids in a message within the limit of bytes: each would become an object, in the loop that serves all."""
    many = (1,) * 250_000
    with serving(toys.toy(4)) as server:
        link = Link(LinkOptions(server.address))
        opening = Opening(FINGERPRINT, Prompt(many))
        calls = [
            ("Open", codec.encode_session_call(SessionCall(1, 0, opening))),
            ("Verify", codec.encode_verify_call(VerifyCall(1, 0, 0, (), many, 0))),
            ("Verify", codec.encode_verify_call(VerifyCall(1, 0, len(many), many, (), 0))),
            (
                "Verify",
                codec.encode_verify_call(
                    VerifyCall(1, 0, 4000, (1,) * 4000, (), 0, Opening(FINGERPRINT, Prompt((1,) * 4000)))
                ),
            ),
        ]
        for method, request in calls:
            with pytest.raises(LimitExceeded):
                link.call(method, request, PATIENCE_S)
        began, num_asked = time.process_time(), itertools.count()
        for _ in range(40):
            with pytest.raises(LimitExceeded):
                link.call("Verify", calls[1][1], PATIENCE_S)
            next(num_asked)
        each_ms = (time.process_time() - began) / next(num_asked) * 1e3
        link.close()
    assert each_ms < 12  # 5; 22 as objects
