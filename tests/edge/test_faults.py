"""Faults of links and servers, with real sockets and a real process: nothing lost, nothing doubled, nobody stuck."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import DecodingParams, Generation, make_plan
from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.cloud.worker import Worker
from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, Serving, free_port, serving

PROMPT = "语速"
PARAMS = DecodingParams(max_new_tokens=120, min_new_tokens=120, temperature=0.8, seed=5)
LOSSLESS = make_plan("lossless", k=4)
GATED = make_plan(gate="entropy:0.3", k=4)


def edge() -> Any:
    return open_toy("toy:drift=0.2")


@pytest.fixture(scope="module")
def expected() -> Generation:
    """What the target alone writes, undisturbed."""
    return skydraft.generate(PROMPT, cloud=open_toy("toy"), plan=make_plan("cloud"), params=PARAMS).run()


@pytest.fixture(scope="module")
def gated() -> Generation:
    """What the gated plan writes in one process."""
    return skydraft.generate(PROMPT, edge=edge(), cloud=open_toy("toy"), plan=GATED, params=PARAMS).run()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_percent_of_chunks_cut_the_connection(expected: Generation, gated: Generation, seed: int) -> None:
    with serving(open_toy("toy")) as server:
        with EmulatedLink(("127.0.0.1", server.port), LinkShape(cut_rate=0.1, seed=seed)) as link:
            cloud = skydraft.connect(link.address, require=True)
            for plan, undisturbed in ((LOSSLESS, expected), (make_plan("cloud"), expected), (GATED, gated)):
                num_cut = link.num_cut
                shorter = replace(PARAMS, max_new_tokens=60)
                generation = skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=plan, params=shorter).run()
                assert generation.token_ids == undisturbed.token_ids[:60]
                assert link.num_cut > num_cut or not plan.drafts
            cloud.close()
        server.wait_until(lambda: server.num_sessions <= 1)


@pytest.mark.parametrize("fault", ["stall", "down", "black hole"])
def test_a_gated_run_falls_back_within_its_patience_whatever_the_link_died_of(fault: str, unhurried: None) -> None:
    noticed = threading.Event()

    def stall_on() -> None:
        while fault == "stall" and not noticed.wait(0.2):
            link.stall(1.0)

    stalling = threading.Thread(target=stall_on, daemon=True)
    with serving(open_toy("toy")) as server, EmulatedLink(("127.0.0.1", server.port)) as link:
        lines: list[str] = []
        cloud = skydraft.connect(link.address, timeout_s=PATIENCE_S, notify=lines.append)
        generation = skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=GATED, params=PARAMS)
        for number, (done, _) in enumerate(generation.rounds()):
            if number == 5:
                if fault == "down":
                    link.down()
                else:
                    link.stall(3600 if fault == "black hole" else 1.0)
                    stalling.start()
            if fault == "stall" and done.record.outcome == "fallback":
                noticed.set()
                time.sleep(0.25)
        fallback = [record for record in generation.records if record.outcome == "fallback"]
        assert fallback and max(record.wall_ms for record in fallback) < PATIENCE_S * 1e3 / 3
        # Only the first round without the cloud waits for it.
        assert [record.link.rtt_ms > 0 for record in fallback] == [True] + [False] * (len(fallback) - 1)
        assert len(lines) == (2 if fault == "stall" else 1)
        assert len(generation.token_ids) == 120
        cloud.close()


def test_four_clients_on_two_seats_evict_each_other_and_lose_nothing(expected: Generation, gated: Generation) -> None:
    def run(server: Any, plan: Any) -> Generation:
        cloud = skydraft.connect(server.address, require=plan is GATED)
        try:
            return skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=plan, params=PARAMS).run()
        finally:
            cloud.close()

    with serving(open_toy("toy"), max_sessions=2, metrics_port=free_port()) as server, ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run, server, plan) for plan in (LOSSLESS, GATED, LOSSLESS, GATED)]
        for done, undisturbed in zip(runs, (expected, gated, expected, gated), strict=True):
            assert done.result(2 * PATIENCE_S).token_ids == undisturbed.token_ids
        server.wait_until(lambda: server.metric("sessions_evicted") > 4)
        assert server.num_sessions <= 2


def test_a_session_that_expired_is_opened_again(expected: Generation) -> None:
    ahead_s, limits = 0.0, Limits(session_ttl_s=600.0)
    worker = Worker(open_toy("toy"), limits, clock=lambda: time.perf_counter() + ahead_s)
    server = Serving(worker, ServeOptions(port=0, limits=limits, metrics_port=free_port()))
    try:
        cloud = skydraft.connect(server.address)
        generation = skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=LOSSLESS, params=PARAMS)
        for number, _ in enumerate(generation.rounds()):
            if number in (3, 8):
                ahead_s += 601
                server.wait_until(lambda: server.num_sessions == 0)
        assert generation.token_ids == expected.token_ids
        server.wait_until(lambda: server.metric("sessions_expired") >= 2)
        assert server.metric("sessions_expired") == 2
        cloud.close()
    finally:
        server.stop()


@pytest.mark.parametrize("plan", [LOSSLESS, make_plan("cloud")], ids=["lossless", "cloud"])
def test_a_server_that_is_full_is_asked_again(expected: Generation, plan: Any) -> None:
    def run(server: Any) -> Generation:
        cloud = skydraft.connect(server.address)
        try:
            return skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=plan, params=PARAMS).run()
        finally:
            cloud.close()

    with serving(open_toy("toy"), max_sessions=1, max_queue=1) as server, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run, server) for _ in range(4)]:
            assert done.result(2 * PATIENCE_S).token_ids == expected.token_ids


def test_the_line_about_an_outage_is_one_line() -> None:
    lines: list[str] = []
    cloud = skydraft.connect("127.0.0.1:9", notify=lines.append)
    skydraft.generate(PROMPT, edge=edge(), cloud=cloud, plan=GATED, params=PARAMS).run()
    assert len(lines) == 1
    assert re.fullmatch(r"The cloud at 127.0.0.1:9 was not reached \(.*\); going on alone\.", lines[0])
    assert len(lines[0]) < 200
    cloud.close()
