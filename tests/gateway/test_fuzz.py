"""Requests that nobody wrote by hand: the gateway answers all of them, stays quick and small, and logs no traceback."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from .apart import TOYS, Apart, apart
from .fuzzing import Fuzzer

LATE_S, MUCH_MIB = 2.0, 250.0
EXPECTED = {200, 400, 404, 413}


def ask(running: Apart, requests: Iterator[tuple[str, bytes]], wrong: list[str]) -> None:
    for path, body in requests:
        try:
            status, reply = running.post(body, path)
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"{error!r} {path} {body[:2000]!r}")
            continue
        if status not in EXPECTED or (status != 200 and not json.loads(reply)["error"]["message"]):
            wrong.append(f"{status} {reply[:300]!r} {path} {body[:2000]!r}")


def fuzz(seeds: list[int], most: int, num: int | None = None, seconds: float = float("inf")) -> None:
    """Ask with all seeds at the same time, `num` requests each, for some seconds at most."""
    until = time.monotonic() + seconds

    def requests(seed: int) -> Iterator[tuple[str, bytes]]:
        for request in islice(Fuzzer(seed, most), num):
            if time.monotonic() > until:
                return
            yield request

    wrong: list[str] = []
    with apart(*TOYS, "--context", "256", "-n", "8") as running:
        running.health_s()
        before = running.resident_mib
        running.forget_peak()
        with running.watched() as seen:
            threads = [threading.Thread(target=ask, args=(running, requests(seed), wrong)) for seed in seeds]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong, "\n".join(wrong[:3])
        assert not seen.wrong and seen.worst_s < LATE_S
        assert running.peak_mib - before < MUCH_MIB
    assert '"level": "error"' not in running.printed


def test_no_request_does_harm() -> None:
    fuzz([1, 2, 3], 30_000, num=150)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_request_does_harm_for_minutes() -> None:
    first = int.from_bytes(os.urandom(4), "big")
    print("seeds from", first)
    fuzz(list(range(first, first + 4)), 200_000, seconds=600)
