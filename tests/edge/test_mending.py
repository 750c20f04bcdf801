"""What is slow, far, busy, limited, stopped or broken for a moment is not gone, and nothing is left behind."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Channel, Waits, shared_loop
from skydraft.edge.verifier import RemoteText, RemoteVerifier
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost
from skydraft.protocol.values import HEALTH

from ..cloud.driver import holding, slow_toy
from ..serving import PATIENCE_S, Process, certified, free_port, serving
from .texts import ALONE, GATED, LOSSLESS, begin, by_plan, undisturbed


@by_plan
def test_a_far_cloud_behind_tls_is_not_gone(tmp_path: Path, plan: Any, unhurried: None) -> None:
    files, signer = certified(tmp_path)
    lines: list[str] = []
    short = DecodingParams(max_new_tokens=12, min_new_tokens=12)
    far = LinkShape(delay_ms=80)
    with (
        serving(open_toy("toy"), **files) as server,
        EmulatedLink(("127.0.0.1", server.port), far) as link,
        closing(skydraft.connect(link.address, tls_ca=signer, notify=lines.append)) as cloud,
    ):
        generation = begin(cloud, plan, short).run()
        assert "edge-fallback" not in generation.origins
        assert generation.token_ids == undisturbed(plan, short)
        assert lines == []


def test_waiting_texts_share_one_ping_and_stay_with_the_cloud(unhurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine, go, _), called, sound = holding(), Counter[str](), Channel.call

    async def call(self: Channel, path: str, timeout_s: float) -> bytes:
        called[path] += 1
        return await sound(self, path, timeout_s)

    monkeypatch.setattr(Channel, "call", call)
    with serving(engine, max_sessions=8) as server, ThreadPoolExecutor(150) as texts:
        cloud = skydraft.connect(server.address)
        edge = open_toy("toy:drift=0.2", 512, 160)
        params = DecodingParams(max_new_tokens=4, min_new_tokens=4)

        def write(number: int) -> Any:
            with skydraft.generate("语速", edge=edge, cloud=cloud, plan=GATED, params=params) as generation:
                return generation.run().origins

        waiting = [texts.submit(write, number) for number in range(150)]
        server.wait_until(lambda: called[HEALTH] > 0)
        called.clear()
        began = time.monotonic()
        time.sleep(1.5)
        num_pings, took_s = called[HEALTH], time.monotonic() - began
        go.set()
        origins = Counter(origin for text in waiting for origin in text.result(2 * PATIENCE_S))
        cloud.close()
    assert num_pings <= 2 + took_s / 0.3
    assert origins.total() == 600 and origins["edge-fallback"] == 0


TIMEOUT_S, NUM_TOKENS = 1.0, 24
CODE = """
import contextlib, skydraft
from skydraft.engines.toy import open_toy
params = skydraft.DecodingParams(max_new_tokens={n}, min_new_tokens={n}, temperature=0.8, seed=3)
with contextlib.closing(skydraft.connect({address!r}, timeout_s={timeout})) as cloud:
    given = {{"edge": open_toy("toy:drift=0.2"), "cloud": cloud, "plan": skydraft.make_plan({plan})}}
    text = skydraft.generate("语速", params=params, **given)
    for round in text.rounds():
        print("round", flush=True)
    print(*text.token_ids)
"""


@pytest.mark.parametrize("plan", ["k=4", "'cloud'"])
def test_an_edge_that_was_stopped_for_longer_than_it_waits_keeps_its_text(plan: str) -> None:
    with serving(slow_toy(0.2)) as server:
        code = CODE.format(n=NUM_TOKENS, address=server.address, timeout=TIMEOUT_S, plan=plan)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as edge:
            assert edge.stdout is not None
            edge.stdout.readline()
            for _ in range(3):
                edge.send_signal(signal.SIGSTOP)
                time.sleep(1.4 * TIMEOUT_S)
                edge.send_signal(signal.SIGCONT)
                time.sleep(0.2)
            out, err = edge.communicate(timeout=PATIENCE_S)
    assert (edge.returncode, err) == (0, "")
    params = DecodingParams(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, temperature=0.8, seed=3)
    text = skydraft.generate("语速", cloud=open_toy("toy"), params=params, plan=skydraft.make_plan("cloud")).run()
    assert out.splitlines()[-1] == " ".join(map(str, text.token_ids))


@pytest.mark.parametrize("plan", [ALONE, make_plan("lossless")], ids=["cloud", "lossless"])
def test_a_reader_who_takes_its_time_is_no_silence_of_the_cloud(plan: Any) -> None:
    server, many = Process(), DecodingParams(max_new_tokens=1000, min_new_tokens=1000)
    with closing(skydraft.connect(server.address, timeout_s=2, require=True)) as cloud:
        generation = begin(cloud, plan, many)
        rounds = generation.rounds()
        next(rounds)
        server.kill()
        server.start()
        time.sleep(2.5)
        try:
            assert sum(1 for _ in rounds) and len(generation.token_ids) == 1000
        finally:
            server.kill()


@pytest.mark.parametrize("plan", [LOSSLESS, make_plan(gate="entropy:100", k=4)], ids=["lossless", "skipped"])
def test_a_text_that_begins_alone_says_so_and_asks_nobody(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the event loop is busy for a moment."""
    asked, lines, sound = list[Any](), list[str](), RemoteVerifier.go_alone

    def go_alone(self: RemoteVerifier, gone: Any) -> None:
        shared_loop().post(lambda: time.sleep(0.1))
        sound(self, gone)

    monkeypatch.setattr(RemoteVerifier, "go_alone", go_alone)

    def ask(text: RemoteText, answers: Any, *given: Any) -> None:
        asked.append(given)
        answers.put(CloudLost("asked"))

    monkeypatch.setattr(RemoteText, "ask", ask)
    address = f"127.0.0.1:{free_port()}"
    with closing(skydraft.connect(address, fallback="start", timeout_s=2, notify=lines.append)) as cloud:
        begin(cloud, plan).run()
    assert not asked and [line.endswith("going on alone.") for line in lines] == [True]


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
