"""Who looks after servers that are not well: one thread for each, no longer than somebody uses them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest

import skydraft
from skydraft.edge.fleet import Fleet, Links
from skydraft.edge.link import LinkOptions
from skydraft.errors import CloudLost, ServersDiffer
from skydraft.protocol.values import ServerInfo

NOBODY = ["127.0.0.1:1", "127.0.0.1:2"]


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "look after"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def info(model: str) -> ServerInfo:
    return ServerInfo(
        version="1", model=model, fingerprint="vocabulary", vocab_size=300, context_len=100, execution="exact",
        max_rows=3, max_block=16, max_sessions=4, num_sessions=0, invariant_rows=3, forward_ms=(1.0, 2.0, 3.0),
        weights=model,
    )  # fmt: skip


def fleet(names: list[str]) -> Fleet:
    """One that asks nobody."""
    made = Fleet([LinkOptions(name) for name in names])
    made._is_watched = made._has_looked = True
    made._watch = lambda *_: None  # type: ignore[method-assign]
    return made


def test_a_cloud_that_nobody_closes_leaves_no_thread() -> None:
    before = len(watchers())
    cloud = skydraft.connect(NOBODY, timeout_s=0.2)
    with pytest.raises(CloudLost):
        cloud.ping(0.2)
    assert len(watchers()) > before
    del cloud
    gc.collect()
    wait_until(lambda: len(watchers()) <= before)


def test_closing_after_another_user_left_ends_them_once() -> None:
    shared = Fleet([LinkOptions(name) for name in NOBODY])
    one, other = Links(shared), Links(shared)
    one.close()
    one.close()
    assert not shared._closed.is_set()
    other.close()
    assert shared._closed.is_set()
    cloud = skydraft.connect(NOBODY)
    beside = cloud.beside(lambda line: None)
    beside.close()
    beside.close()
    assert not cloud._links.fleet._closed.is_set()  # closing twice leaves once
    cloud.close()
    assert cloud._links.fleet._closed.is_set()


def test_one_thread_looks_after_a_server_however_often_it_is_lost() -> None:
    before = len(watchers())
    cloud = skydraft.connect(NOBODY, timeout_s=0.2)
    with pytest.raises(CloudLost):
        cloud.ping(0.2)
    watched = cloud._links.fleet
    for _ in range(5):
        watched._servers[NOBODY[0]].error = None  # as when another server that changed makes it well
        watched.lost(NOBODY[0], CloudLost("gone."))
    assert len(watchers()) - before <= len(NOBODY)
    cloud.close()
    wait_until(lambda: len(watchers()) <= before)


@pytest.mark.parametrize(("away_s", "has_changed"), [(3600.0, True), (1.0, False)])
def test_a_server_that_never_returns_keeps_the_others_from_nothing(away_s: float, has_changed: bool) -> None:
    names = ["a:7373", "b:7373", "c:7373"]
    changed = fleet(names)
    with changed._changed:  # as whoever looks after a server does
        for name in names:
            changed._meet(name, info("old"))
        changed._refuse_unlike()
        assert changed.target is not None
        before = changed.target
        changed.lost("c:7373", CloudLost("gone."))
        changed._servers["c:7373"].lost_at -= away_s
        assert not changed._meet("a:7373", info("new"))  # b still runs what all did
        assert isinstance(changed._servers["a:7373"].error, ServersDiffer)
        assert changed._meet("b:7373", info("new")) == has_changed
    assert (changed._servers["a:7373"].error is None) == has_changed
    assert (changed.target != before) == has_changed
