"""What is slow, far, busy, limited, stopped or broken for a moment is not gone, and nothing is left behind."""

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
from skydraft import DecodingParams, make_plan
from skydraft.edge.channel import Waits

from ..cloud.driver import slow_toy
from ..serving import PATIENCE_S, free_port, serving
from .texts import ALONE, PARAMS, Start, begin, script, undisturbed


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
