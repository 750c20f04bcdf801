"""The judge over vLLM, with a toy in the place of vLLM: what is written is what any other target would have written."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.cloud.docket import Job
from skydraft.cloud.limits import Limits
from skydraft.cloud.vllm.judge import VllmJudge
from skydraft.cloud.vllm.targets import VllmSeats
from skydraft.config import MAX_K, decoding_params
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudFailure, EngineError, PromptError, SessionNotFound, SkydraftError
from skydraft.protocol.codec import digest, short_fingerprint
from skydraft.protocol.values import OpenCall, Opened, Opening, ServerInfo, VerifyCall
from skydraft.types import Media, Prompt
from tests import toys
from tests.cloud.fake_vllm import FakeVllm
from tests.decoding.test_hand_back import assert_whose
from tests.serving import Serving, serving

pytestmark = pytest.mark.usefixtures("fixed_k")
PARAMS = [
    decoding_params(max_new_tokens=48),
    decoding_params(max_new_tokens=48, temperature=0.8, seed=5, top_p=0.9),
    decoding_params(max_new_tokens=48, repetition_penalty=1.2, no_repeat_ngram_size=2, frequency_penalty=0.5),
    decoding_params("zh-short", max_new_tokens=48),
]


@contextmanager
def judging(
    limits: dict[str, Any] | None = None, health: list[bool] | None = None, toy: Any = None, **fake: Any
) -> Iterator[tuple[Serving, FakeVllm]]:
    """A server over a stand-in; what it says of its health goes to `health`."""
    engine = FakeVllm(toy or open_toy("toy"), **fake)
    judge = VllmJudge(engine, Limits(**(limits or {})))  # type: ignore[arg-type]  # a stand-in
    judge.start()
    try:
        with serving(judge, execution="throughput", **(limits or {})) as server:
            hear = judge.on_health
            judge.on_health = lambda is_well: (health is not None and health.append(is_well), hear(is_well))[1]  # type: ignore[func-returns-value]
            yield server, engine
    finally:
        judge.close()
        judge.close()


def written(cloud: Any, params: Any, prompt: str = "你好世界", mode: str = "lossless", **plan: Any) -> tuple[int, ...]:
    edge = open_toy("toy:drift=0.3")
    generation = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=skydraft.make_plan(mode, **plan), params=params)
    generation.run()
    return tuple(generation.token_ids)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("plan", [{}, {"mode": "cloud"}, {"mode": "quality", "hand_back": "4"}])
def test_a_text_is_that_of_a_target_in_this_process(params: Any, plan: dict[str, str]) -> None:
    """With agree:M it depends on what crosses a stop."""
    with judging() as (server, _):
        cloud = skydraft.connect(server.address)
        assert written(cloud, params, **plan) == written(open_toy("toy"), params, **plan)


def test_the_server_tells_what_it_runs() -> None:
    with judging() as (server, _):
        info: ServerInfo = skydraft.connect(server.address).info()
    assert (info.engine, info.dtype, info.execution) == ("vllm 0", "float32", "throughput")


def test_eight_clients_at_once_share_two_seats() -> None:
    expected = {prompt: written(open_toy("toy"), PARAMS[1], prompt) for prompt in map(str, range(8))}
    with judging({"max_sessions": 2}, pause_s=0.001) as (server, _), ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda prompt: written(skydraft.connect(server.address), PARAMS[1], prompt), expected)
        assert list(found) == list(expected.values())


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    ("mode", "hand_back"),
    [("lossless", "3"), ("lossless", "agree:2"), ("lossless", "text"), ("quality", "3"), ("quality", "text")],
)
def test_it_writes_on_after_a_correction(params: Any, mode: str, hand_back: str) -> None:
    with judging() as (server, _):
        cloud = skydraft.connect(server.address, require=True)
        far = written(cloud, params, mode=mode, k=6, hand_back=hand_back)
    assert far == written(open_toy("toy"), params, mode=mode, k=6, hand_back=hand_back)


def test_each_token_of_a_gated_text_is_the_choice_of_the_model_that_it_is_said_to_be() -> None:
    edge, plan = toys.toy(4, 0.2), skydraft.make_plan(gate="entropy:1.8", k=6, hand_back="agree:1")
    origins: set[str] = set()
    with judging(toy=toys.toy(4)) as (server, _):
        cloud = skydraft.connect(server.address, require=True)
        for seed in range(16):  # what the target writes before the stop arrives depends on the machine
            params = decoding_params(max_new_tokens=60, min_new_tokens=60, temperature=0.8, seed=seed)
            done = skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True).run()
            assert_whose(done, edge, toys.toy(4), params)
            origins |= set(done.origins)
            if seed >= 3 and origins >= {"skipped", "accepted", "recovered", "cloud"}:
                break
    assert origins >= {"skipped", "accepted", "recovered", "cloud"}


@pytest.mark.parametrize(("mode", "plan"), [("lossless", {}), ("cloud", {}), ("lossless", {"hand_back": "agree:2"})])
def test_an_engine_that_dies_loses_and_doubles_nothing(mode: str, plan: dict[str, Any]) -> None:
    health: list[bool] = []
    with judging(health=health, dies_at={3, 9, 12}) as (server, engine):
        cloud = skydraft.connect(server.address)
        assert written(cloud, PARAMS[1], mode=mode, **plan) == written(open_toy("toy"), PARAMS[1], mode=mode)
        assert engine.num_starts == 4 and health == [False, True] * 3


def health_of(server: Serving) -> int:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return int(reply.status)


def test_health_says_so_while_the_engine_is_started_again() -> None:
    with judging(dies_at={3}) as (server, engine), ThreadPoolExecutor(1) as pool:
        assert health_of(server) == 1  # SERVING
        engine.may_start.clear()
        text = pool.submit(written, skydraft.connect(server.address), PARAMS[0])
        server.wait_until(lambda: health_of(server) == 2)  # NOT_SERVING
        assert not text.done()
        engine.may_start.set()
        assert text.result(30) == written(open_toy("toy"), PARAMS[0])
        server.wait_until(lambda: health_of(server) == 1)


def test_its_times_are_measured_when_it_starts() -> None:
    with judging() as (server, _):
        times = skydraft.connect(server.address).info().forward_ms
    assert len(times) == MAX_K + 1 and min(times) > 0


def test_who_kills_it_twice_is_refused_and_the_others_go_on() -> None:
    with judging(dies_at={2, 3}) as (server, engine):
        cloud = skydraft.connect(server.address)
        # The first request reads the prompt, the second and its repeat kill. The session is opened again.
        assert written(cloud, PARAMS[0]) == written(open_toy("toy"), PARAMS[0])
        assert engine.num_starts == 3


def test_an_engine_that_dies_whatever_it_is_asked_ends_the_server() -> None:
    engine = FakeVllm(open_toy("toy"), dies_at=set(range(1, 100)))
    judge = VllmJudge(engine, Limits())  # type: ignore[arg-type]
    judge.start()
    running = Serving(judge, skydraft_options())
    for _ in range(2):
        with pytest.raises(SkydraftError):
            written(skydraft.connect(running.address, timeout_s=3), PARAMS[0])
    running.wait_until(lambda: judge.docket.is_stopping)
    running.stop()
    judge.close()


def skydraft_options() -> Any:
    from skydraft.cloud.server import ServeOptions

    return ServeOptions(port=0, execution="throughput")


def test_one_text_twice_in_one_scope_is_read_again_once_and_not_in_each_round() -> None:
    params = decoding_params(max_new_tokens=40)
    with judging() as (server, engine):
        costs = []
        for _ in range(2):
            before = engine.num_requests
            cloud, edge = skydraft.connect(server.address), open_toy("toy:drift=0.3")
            skydraft.generate("你好世界", edge=edge, cloud=cloud, params=params, cache_scope="one").run()
            costs.append(engine.num_requests - before)
    assert costs[1] == costs[0] + 1


def test_parameters_cross_once() -> None:
    with judging() as (server, engine):
        written(skydraft.connect(server.address), PARAMS[1])
        texts = [asking.params for asking in engine.asked if asking]
    assert texts[0] and not any(texts[1:]) and len(texts) > 3


def test_a_stream_guesses_and_asks_less_often_than_for_each_token() -> None:
    params = decoding_params(max_new_tokens=100, logit_bias=((50, 99.0), (51, 98.0)), no_repeat_ngram_size=0)
    with judging() as (server, engine):
        tokens = written(skydraft.connect(server.address), params, mode="cloud")
        assert tokens == written(open_toy("toy"), params, mode="cloud")
        assert 2 * engine.num_requests < len(tokens) == 100


def test_speech_is_refused() -> None:
    seats = VllmSeats(FakeVllm(open_toy("toy")).served)
    media = Media(np.zeros((4, 100), np.float32))
    with pytest.raises(PromptError, match="takes no audio"):
        seats.target(Opening("", Prompt((1,), (media,))))
    for prompt in ((), (1,) * 5000):
        with pytest.raises(PromptError):
            seats.target(Opening("", Prompt(prompt)))


def test_a_row_that_is_no_number_is_the_servers_failure_and_of_one_job_alone() -> None:
    toy = toys.toy(3)
    engine = FakeVllm(toy)
    judge = VllmJudge(engine, Limits())  # type: ignore[arg-type]
    judge.start()
    toy.forward = lambda *_, **__: (_ for _ in ()).throw(EngineError("no"))
    with serving(judge, execution="throughput") as server, pytest.raises(CloudFailure):
        params = decoding_params(max_new_tokens=9)
        edge = toys.toy(3)
        cloud = skydraft.connect(server.address, timeout_s=2)
        skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, params=params, raw=True).run()
    judge.close()


def test_a_later_epoch_that_comes_while_the_prompt_is_read_keeps_its_session() -> None:
    engine = FakeVllm(open_toy("toy"), pause_s=0.05)
    judge = VllmJudge(engine, Limits())  # type: ignore[arg-type]
    judge.start()
    thread = threading.Thread(target=judge.run, daemon=True)
    thread.start()
    answers: queue.Queue[tuple[str, Any]] = queue.Queue()

    def ask(name: str, call: Any) -> None:
        job = Job(call, "ann", lambda answer, is_last: answers.put((name, answer)), 0.0)
        judge.post(partial(judge.docket.take, job))

    opening = Opening(short_fingerprint(engine.served.vocab.fingerprint), Prompt((5, 6, 7)))
    ask("first", OpenCall(9, 0, opening))
    time.sleep(0.02)
    ask("second", OpenCall(9, 1, opening))
    found = dict(answers.get(timeout=10) for _ in range(2))
    assert isinstance(found["first"], SessionNotFound) and found["second"] == Opened(0)
    time.sleep(0.1)  # until what the first one asked for has come back too
    ask("verify", VerifyCall(9, 1, 0, (), (), digest(np.array([5, 6, 7], np.int32))))
    assert answers.get(timeout=10)[1].num_tokens == 1
    judge.post(judge.docket.stop)
    thread.join(10)
    judge.close()
    assert not thread.is_alive()
