"""A server behind either wire, with a connection: both are spoilt, killed and replaced in the same words."""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import skydraft
from skydraft.access.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import character_vocab
from tests import toys
from tests.hostile.storms import stalls
from tests.hostile.texts import ALONE, TARGET, letters, write
from tests.serving import OwnFault, Relay, Serving, free_port, waiting
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault

WIRES = ("own", "stock")
DIALECTS = ("llama-server", "sglang")  # of a stock server, where it says ids in another way; "stock" speaks vLLM's


class OwnLine:
    """`skydraft serve` over gRPC, on a port of its own, behind a relay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._serving = Serving(self._engine, ServeOptions(port=0, limits=Limits(max_sessions=16)))
        self.relay = Relay(self._serving.address, self.port)

    def kill(self) -> None:
        self.relay.close()
        self._serving.stop()

    def become(self, engine: Engine) -> None:
        self._engine = engine

    def storm(self, coming: Iterable[OwnFault | None]) -> None:
        self.relay.faults = iter(coming)

    def silence(self) -> None:
        self.relay.silence = stalls(0)

    def calm(self) -> None:
        self.relay.faults, self.relay.silence = iter(()), None


class StockLine:
    """A server without skydraft over HTTP, in the words of `OwnLine`: `storm` is of requests that generate."""

    def __init__(self, server: Fake) -> None:
        self.server, self.url = server, f"{server.url}/v1"
        self.kill, self.start = server.kill, server.start

    def storm(self, coming: Iterable[Fault | None]) -> None:
        left = iter(coming)
        self.server.fault_of = lambda path: next(left, None) if path in GENERATING else None

    def silence(self) -> None:
        self.server.fault_of = lambda path: faults.silent()

    def calm(self) -> None:
        self.server.fault_of = lambda path: None

    def become(self, engine: Engine) -> None:
        self.server.become(engine, "another")


@contextmanager
def line(wire: str, *, token_s: float = 0.0, is_other: bool = False) -> Iterator[OwnLine | StockLine]:
    """A server that takes so long for each token; another model with another vocabulary if `is_other`."""
    if wire == "own":
        own = OwnLine(toys.toy(1) if is_other else waiting(letters("toy"), lambda: time.sleep(token_s)))
        try:
            yield own
        finally:
            own.kill()
    else:
        with fake("vllm" if wire == "stock" else wire, TARGET, token_s=token_s) as stock:
            stock.model.tokenizer = character_vocab("一二三") if is_other else stock.model.tokenizer
            yield StockLine(stock)


@contextmanager
def known(line: OwnLine | StockLine, timeout_s: float, **options: Any) -> Iterator[Cloud]:
    """A connection that has worked, however long that took, and waits for so long from now on."""
    with closing(skydraft.connect(line.url, **options)) as cloud:
        assert write(cloud, "cloud").run().token_ids == ALONE
        cloud.timeout_s = timeout_s
        yield cloud
