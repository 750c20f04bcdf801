"""A server that lies, floods and refuses: the edge ends with an error of its own, soon, small, and in one piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.decoding.block_length import MAX_AUTO_K, AutoK
from skydraft.decoding.cost_model import CostModel
from skydraft.errors import CloudError, CloudFailure, LimitExceeded, RateLimited
from skydraft.gating.risk import LearnedRisk
from skydraft.gating.signals import CERTAIN
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.info import encode_info
from skydraft.protocol.status import to_status
from skydraft.protocol.values import Emission, Opened, ServerInfo, VerifyCall
from skydraft.types import Cost, DraftBlock, LinkCost, Round, StepRecord, Verdict

from .. import toys
from ..serving import Serving, asked
from ..toys import PROMPT, VOCAB

INFO = ServerInfo(
    "1", "toy", codec.short_fingerprint(VOCAB.fingerprint), VOCAB.size, 4096, "exact", 64, 32, 8, 0, 64, (1.0,)
)


class Liar(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types for it
    """A server that answers what it is told to; it counts what it was asked, and the bytes that it streamed."""

    def __init__(
        self, verify: Callable[[bytes, Any], bytes], generate: Callable[[], Iterator[bytes]], has_sessions: bool
    ) -> None:
        self.num_asked = self.num_streamed = 0
        self._verify, self._generate, self._has_sessions = verify, generate, has_sessions

    def service(self, details: Any) -> Any:
        known = {"Check": b"\x08\x01", "GetInfo": encode_info(INFO), "Open": codec.encode_opened(Opened(0))}
        name = details.method.rpartition("/")[2]

        def unary(request: bytes, context: Any) -> bytes:
            if name != "Verify":
                return known.get(name, b"")
            self.num_asked += 1
            return self._verify(request, context)

        def stream(request: bytes, context: Any) -> Iterator[bytes]:
            for message in self._generate():
                self.num_streamed += len(message)
                yield message

        def session(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            for request in requests:
                action = pb.VerifyRequest.FromString(request).action
                if action == pb.ACTION_CLOSE:
                    return
                if action == pb.ACTION_OPEN:
                    yield codec.encode_opened(Opened(0), None, pb.VerifyReply)
                    continue
                self.num_asked += 1
                yield self._verify(request, context)

        if name == "Generate":
            return grpc.unary_stream_rpc_method_handler(stream)
        if name == "Session" and self._has_sessions:
            return grpc.stream_stream_rpc_method_handler(session)
        if name == "Session":
            return None
        return grpc.unary_unary_rpc_method_handler(unary)


@contextmanager
def lying(
    verify: Callable[[bytes, Any], bytes] = lambda request, context: b"", *,
    generate: Callable[[], Iterator[bytes]] = lambda: iter(()), has_sessions: bool = True, **options: Any,
) -> Iterator[tuple[Liar, str]]:  # fmt: skip
    liar = Liar(verify, generate, has_sessions)
    limits = [("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), [liar], options=limits, **options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield liar, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def ask(address: str, mode: str = "lossless", **options: Any) -> skydraft.Generation:
    cloud = skydraft.connect(address, timeout_s=options.pop("timeout_s", 2.0))
    try:
        plan, params = make_plan(mode), DecodingParams(max_new_tokens=50)
        return skydraft.generate(PROMPT, edge=toys.toy(1), cloud=cloud, plan=plan, params=params, raw=True).run()
    finally:
        cloud.close()


def test_a_stream_that_nobody_reads_yet_is_not_kept_without_bound() -> None:
    """The edge takes one token and thinks: what the server sends meanwhile has to wait at the server."""
    message = codec.encode_emission(Emission(0, (3,) * 20_000))
    endless = (message for _ in range(10_000))
    with lying(generate=lambda: endless) as (liar, address):
        cloud = skydraft.connect(address)
        generation = skydraft.generate(PROMPT, edge=toys.toy(1), cloud=cloud, plan=make_plan("cloud"), raw=True)
        next(iter(generation))
        before = -1
        while liar.num_streamed > before:
            before = liar.num_streamed
            time.sleep(0.3)
        generation.close()
        cloud.close()
    assert before < 24 * 1024 * 1024  # what gRPC and the kernel hold, and a megabyte
    Serving.wait_until(lambda: not any(thread.name == "stream" for thread in threading.enumerate()))


def test_a_server_that_says_come_back_now_is_not_asked_without_a_pause() -> None:
    def refuse(request: bytes, context: Any) -> bytes:
        context.abort_with_status(to_status(RateLimited("no", retry_after_s=0.0)))
        raise AssertionError

    with lying(refuse) as (liar, address), pytest.raises(CloudError):
        ask(address)
    assert liar.num_asked < 30


@pytest.mark.parametrize("prefill_ms", [0.0, 4.0, 1e6])
def test_no_cost_that_a_server_can_state_breaks_the_choice_of_k(prefill_ms: float) -> None:
    """A prefill of four times a forward that took none made the next round divide by zero."""
    auto = AutoK(CostModel(1.0, (1.0,), 64, wire_ms=1.0, streams=True), LearnedRisk())
    target = Cost(1, 1, prefill_ms=prefill_ms)
    record = StepRecord(1, 0, 1, 1, 2, "verified", "", 1.0, 1.0, Cost(1, 1, 1.0), target, LinkCost(1.0))
    for number in range(4000):
        auto.observe(Round(replace(record, round=number), DraftBlock(0, (1,), (CERTAIN,)), (), ()))
        assert 0 <= auto.longest() <= MAX_AUTO_K
        assert auto.is_enough([CERTAIN] * MAX_AUTO_K)


def verdict(request: bytes, **lies: Any) -> bytes:
    call = asked("Verify", request)
    assert isinstance(call, VerifyCall)
    told = Verdict(call.base, 0, 3, audit=(True,) * len(call.catch_up_ids))
    return codec.encode_verdict(replace(told, **lies))


@pytest.mark.parametrize(
    "lies",
    [{"audit": (True,) * 9}, {"base": 7}, {"num_accepted": 30}, {"token_id": 2**31 - 1}],
    ids=["audit", "base", "accepted", "token"],
)
def test_a_verdict_that_cannot_be_is_committed_by_nobody(lies: dict[str, Any]) -> None:
    with lying(lambda request, context: verdict(request, **lies)) as (liar, address), pytest.raises(CloudFailure):
        ask(address)
    assert liar.num_asked == 3


@pytest.mark.parametrize("messages", [[b""], [b"\xff"], [codec.encode_emission(Emission(9, (3,)))]])
def test_an_endless_stream_of_nonsense_ends(messages: list[bytes]) -> None:
    with lying(generate=lambda: (messages[0] for _ in range(10**6))) as (_, address), pytest.raises(CloudError):
        ask(address, "cloud", timeout_s=1.0)


def test_a_reply_that_unpacks_to_more_than_a_message_may_hold_is_refused() -> None:
    """64 MB of zeros, 64 kB on the wire."""
    with (
        lying(lambda request, context: b"\0" * (64 << 20), compression=grpc.Compression.Gzip) as (_, address),
        pytest.raises((LimitExceeded, CloudError)),
    ):
        ask(address)
