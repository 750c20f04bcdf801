"""How generations end that are cancelled, left or forgotten, what many of them take at once, and what a process is told
that was forked after a cloud was used.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import skydraft
from bench.emulated_link import EmulatedLink
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, Process, Relay, Serving, ran_s, serving, waiting
from ..stock.fakes import fake
from .conftest import LOSSLESS, PLANS, begin, by_plan, script, undisturbed

LONG = DecodingParams(max_new_tokens=3000, min_new_tokens=3000)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    slow = waiting(open_toy("toy"), lambda: time.sleep(0.001))  # what it streams is not over before it is left
    with serving(slow, session_ttl_s=600.0) as running:
        yield running


# Uses a cloud, forks, and tells what becomes of it in the child: texts of the same cloud, of a new one, and one that
# the parent began.
PROGRAM = """
import os, sys
import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy
from skydraft.errors import SkydraftError

def write(cloud, mode="cloud"):
    params = DecodingParams(max_new_tokens=8)
    return skydraft.generate("语速", edge=open_toy("toy"), cloud=cloud, plan=make_plan(mode), params=params, raw=True)

cloud = skydraft.connect(sys.argv[1], timeout_s=5)
write(cloud).run()
begun = iter(write(cloud))
next(begun)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
new = lambda: skydraft.connect(sys.argv[1], timeout_s=5)
for text in (lambda: begun, lambda: write(cloud), lambda: write(cloud, "lossless"), lambda: write(new())):
    try:
        print(list(text()), flush=True)
    except SkydraftError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
cloud.close()
os._exit(0)  # as processes of multiprocessing end
"""


@pytest.mark.parametrize("num_rounds", [0, 4])
@by_plan
def test_a_generation_that_waits_in_vain_ends_when_it_is_cancelled(server: Serving, plan: Any, num_rounds: int) -> None:
    """Replies are held; the session ends at the server as well."""
    with Relay(server.address) as relay, closing(skydraft.connect(relay.address, require=True)) as cloud:
        generation = begin(cloud, plan, LONG)
        rounds = generation.rounds()
        for _ in range(num_rounds):
            next(rounds)
        relay.hold()
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(lambda: [*rounds, ran_s()][-1])
            time.sleep(0.3)
            assert not going.done()
            began = ran_s()
            generation.cancel()
            assert going.result(PATIENCE_S) - began < 0.5
        generation.close()
        relay.let_go()
        server.wait_until(lambda: server.num_sessions == 0)


ENDS = {
    "left": ("gate='entropy:0.3', k=4", ""),
    "collected": ("k=5", "del rounds, generation; import gc; gc.collect()"),
    "closed": ("'cloud'", "generation.close()"),
    "closed with its cloud": ("gate='entropy:0.3', k=4", "generation.close(); cloud.close()"),
    "waits in a thread": (
        "'cloud'", "threading.Thread(target=lambda: list(rounds), daemon=True).start()"
    ),
}  # fmt: skip


def ending_s(program: list[str]) -> float:
    """Seconds from the moment when a program says that it is over to its end, in which it is to be silent."""
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "over\n"
    began = time.monotonic()
    assert (*running.communicate(timeout=PATIENCE_S), running.returncode) == ("", "", 0)
    return time.monotonic() - began


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_leaves_a_text_in_the_middle_ends_soon_and_without_a_word(server: Serving, how: str) -> None:
    plan, does = ENDS[how]
    program = script(server.address, plan, does)
    assert any(ending_s(program) < 4.0 for _ in range(3))  # where it does not end by itself, all of them last too long
    if how.startswith("c"):
        server.wait_until(lambda: server.num_sessions == 0)
    server.forget_sessions()


def test_streams_that_a_server_ends_while_they_are_idle_end_without_a_word() -> None:
    with serving(open_toy("toy"), session_ttl_s=0.5) as idle:
        ending_s(script(idle.address, "gate='entropy:0.3', k=4", "time.sleep(2)"))


def taken() -> tuple[int, int]:
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    others = [thread for thread in threading.enumerate() if thread.name != "skydraft drafts"]  # one for each text
    return len(others), sum("socket:" in file for file in files)


def test_threads_and_sockets_do_not_grow_with_generations() -> None:
    """The server is a process of its own, whose threads and sockets do not count."""
    gc.collect()  # what earlier tests left
    process, short = Process("--max-sessions", "16"), DecodingParams(max_new_tokens=30, min_new_tokens=30)
    plans = [*PLANS.values(), make_plan()]
    try:
        with closing(skydraft.connect(process.address, timeout_s=PATIENCE_S)) as cloud:

            def open_at_once(num: int) -> tuple[int, int]:
                """What is taken while so many generations have streams of their own, all in this thread."""
                generations = [begin(cloud, plans[number % len(plans)], LONG) for number in range(num)]
                for generation in generations:
                    rounds = generation.rounds()
                    for _ in range(3):
                        next(rounds)
                found = taken()
                for generation in generations:
                    generation.close()
                Serving.wait_until(lambda: cloud.info().num_sessions == 0)
                return found

            open_at_once(1)  # what is made once for the process is there
            one = open_at_once(1)
            assert open_at_once(8) == one
            with ThreadPoolExecutor(8) as pool:
                texts = list(pool.map(lambda number: begin(cloud, plans[number % 4], short).run().token_ids, range(50)))
            assert len({text for number, text in enumerate(texts) if number % 4 != 2}) == 1  # all are the target's
            assert open_at_once(1) == one
            Serving.wait_until(lambda: all(each.name != "skydraft drafts" for each in threading.enumerate()))
    finally:
        process.kill()


def test_generations_whose_connection_breaks_share_the_next_one(server: Serving) -> None:
    """Each leaves the connection on which it failed, and not the one that another has made since."""
    short = DecodingParams(max_new_tokens=120, min_new_tokens=120)
    with (
        EmulatedLink(("127.0.0.1", server.port)) as link,
        closing(skydraft.connect(link.address, timeout_s=PATIENCE_S)) as cloud,
    ):
        generations = [begin(cloud, LOSSLESS, short) for _ in range(8)]
        met = threading.Barrier(8, link.cut)

        def run(generation: Generation) -> tuple[int, ...]:
            for number, _ in enumerate(generation.rounds()):
                if number == 3:
                    met.wait(PATIENCE_S)
            return generation.token_ids

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(run, generations)) == {undisturbed(LOSSLESS, short)}
        # A third one where a busy machine let the second look silent; one each would be nine.
        assert link.num_connections in (2, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_forked_process_is_told_so(kind: str) -> None:
    """gRPC hung or raised an error of asyncio."""
    with fake("vllm") as stock, serving(open_toy("toy")) as own:
        program = [sys.executable, "-c", PROGRAM, stock.url if kind == "stock" else own.address]
        for _ in range(20):  # a fork while threads are within gRPC may end the child before its first line
            done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode != 256 - signal.SIGSEGV:
                break
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("OptionError: This process was forked after a cloud was used"), lines
