"""What is slow, far, busy, limited, stopped or broken for a moment is not gone, and nothing is left behind."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Waits
from skydraft.engines.toy import open_toy

from ..cloud.driver import slow_toy
from ..serving import PATIENCE_S, Process, serving
from .texts import ALONE, begin

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
