"""What tests of the edge share: one text to ask servers for, lists of servers, and connections."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy

from .. import toys
from ..serving import PATIENCE_S, Relay, Serving, serving

TEXT = "语速"
PARAMS = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=5)
LOSSLESS, ALONE, GATED = make_plan("lossless", k=4), make_plan("cloud"), make_plan(gate="entropy:0.3", k=4)
RACE = make_plan("lossless")
PLANS = {"lossless": LOSSLESS, "cloud": ALONE, "gated": GATED}
by_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
Start = Callable[..., Serving]
SEEDS = (4, 17, 33)


def begin(cloud: Cloud | Engine, plan: Any = LOSSLESS, params: DecodingParams = PARAMS) -> Generation:
    return skydraft.generate(TEXT, edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=params)


def undisturbed(plan: Any = LOSSLESS, params: DecodingParams = PARAMS) -> tuple[int, ...]:
    """What one process writes."""
    return begin(open_toy("toy"), plan, params).run().token_ids


def connected(servers: list[Serving], **options: Any) -> Cloud:
    return skydraft.connect([each.address for each in servers], timeout_s=PATIENCE_S, **options)


def home(servers: list[Serving]) -> tuple[Serving, Serving]:
    """(where the only session is, one of the others)"""
    there, *others = sorted(servers, key=lambda each: -each.num_sessions)
    assert there.num_sessions == 1 and not any(each.num_sessions for each in others)
    return there, others[0]


# A program that begins a long text, does something, and says that it is over.
SCRIPT = """
import skydraft, threading, time
from skydraft.engines.toy import open_toy
cloud = skydraft.connect({address!r}, timeout_s={timeout_s})
params = skydraft.DecodingParams(max_new_tokens={length}, min_new_tokens={length}, temperature=0.8, seed=5)
given = {{"edge": open_toy("toy:drift=0.2"), "cloud": cloud, "plan": skydraft.make_plan({plan}), "params": params}}
generation = skydraft.generate("语速", **given)
rounds = generation.rounds()
next(rounds); next(rounds)
{does}
print("over", flush=True)
"""


def script(address: str, plan: str, does: str, *, length: int = 3000, timeout_s: float = 30.0) -> list[str]:
    """What runs that program with a plan, as `make_plan` gets it."""
    code = SCRIPT.format(address=address, plan=plan, does=does, length=length, timeout_s=timeout_s)
    return [sys.executable, "-c", code]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda engine=None, **options: stack.enter_context(serving(engine or open_toy("toy"), **options))


@pytest.fixture
def relay() -> Iterator[Relay]:
    with serving(open_toy("toy")) as server, Relay(server.address) as running:
        yield running


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[int, Any]]:
    """A connection to a server for each target; it is waited for, since a busy machine is no fault of the link."""
    with ExitStack() as stack:
        servers = {seed: stack.enter_context(serving(toys.toy(seed))) for seed in SEEDS}
        connected = {seed: skydraft.connect(server.address, require=True) for seed, server in servers.items()}
        for each in connected.values():
            stack.enter_context(closing(each))
        yield connected
