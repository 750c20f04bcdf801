"""A list of servers: who goes where, who is left out, and that no text tells the difference."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.edge.server import Server
from skydraft.edge.servers import Servers
from skydraft.edge.session import OwnServer, OwnText
from skydraft.edge.tls import ServerOptions
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, CloudTimeout, NotAuthorized, OptionError, VocabularyMismatch
from skydraft.protocol.address import parse_addresses

from .. import toys
from ..serving import PATIENCE_S, Process, free_port, waiting
from ..toys import law
from .coming_and_going import faults, written
from .texts import ALONE, GATED, LOSSLESS, PARAMS, Start, begin, by_plan, connected, home, undisturbed

TOKENS = "phone a-token-of-24-characters\n"
LONG = replace(PARAMS, max_new_tokens=1500, min_new_tokens=1500)  # what is streamed is read ahead

# --- Lists


LISTS = {
    "a": ["a:7373"], "a:1,b:2 , c": ["a:1", "b:2", "c:7373"], "[::1]:1,[::2]": ["[::1]:1", "[::2]:7373"],
    "a,b,a:7373": ["a:7373", "b:7373"], "Cloud.example,cloud.EXAMPLE": ["Cloud.example:7373"],
    "[::1],[0:0::1]:7373": ["[::1]:7373"],
}  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_servers_has_commas_between(text: str) -> None:
    assert parse_addresses(text) == LISTS[text]
    with closing(skydraft.connect(text)), closing(skydraft.connect(text.split(","))):
        pass


@pytest.mark.parametrize("text", ["", "a,,b", "a,", ",", "a,b c", "a,b:0", "a:７３７３", "::1,::2"])
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not "):
        skydraft.connect(text)


# --- Where a session goes


def servers_of(names: list[str]) -> Servers:
    return Servers([OwnServer(ServerOptions(name)) for name in names])


def named(servers: Servers, name: str) -> Server:
    return next(server for server in servers.all if server.address == name)


def order(servers: Servers, number: int) -> list[str]:
    return [server.address for server in servers.in_order(number)]


@law(30)
@given(st.lists(st.integers(1, 999), min_size=2, max_size=6, unique=True), st.integers(1, 2**21 - 1), st.data())
def test_a_server_that_is_lost_is_tried_last_and_the_rest_keep_their_order(
    ports: list[int], number: int, data: st.DataObject
) -> None:
    names = [f"server:{port}" for port in ports]
    servers, lost = servers_of(names), data.draw(st.sampled_from(names))
    before = order(servers, number)
    assert sorted(before) == sorted(names)
    assert order(servers_of(names[::-1]), number) == before  # however the list is written
    servers.lost(named(servers, lost))
    assert order(servers, number) == [*(name for name in before if name != lost), lost]


def test_numbers_spread_over_servers_evenly_and_over_the_rest_when_one_is_lost() -> None:
    names = ["a:7373", "b:7373", "c:7373"]
    servers = servers_of(names)
    for well in (names, names[:2]):
        counts = Counter(order(servers, number)[0] for number in range(1, 3001))
        assert set(counts) == set(well) and max(counts.values()) < 1.1 * 3000 / len(well)
        servers.lost(named(servers, "c:7373"))


def test_a_server_that_was_lost_gets_new_sessions_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = servers_of(["a:7373", "b:7373"])
    first = servers.in_order(1)[0]
    servers.lost(first)
    assert servers.in_order(1)[-1] is first
    now = time.monotonic()
    monkeypatch.setattr("skydraft.edge.servers.time", SimpleNamespace(monotonic=lambda: now + 10))
    assert servers.in_order(1)[0] is first


# --- When a server goes


@pytest.mark.parametrize("how", ["dies", "drains"])
@by_plan
def test_a_text_goes_on_at_another_server_when_its_own_one_goes(
    start: Start, plan: Any, how: str, unhurried: None
) -> None:
    params = LONG if plan is ALONE else PARAMS
    servers, lines = [start(slow(plan)), start(slow(plan))], list[str]()
    with closing(connected(servers, notify=lines.append)) as cloud:
        generation = begin(cloud, plan, params)
        for number, _ in enumerate(generation.rounds()):
            if number == 5:
                there, other = home(servers)
                there.stop(grace_s=0.3 if how == "drains" else 0.0)
            if number == 12:
                assert plan is ALONE or other.num_sessions == 1
        assert "edge-fallback" not in generation.origins and lines == []
        assert generation.token_ids == undisturbed(plan, params)


def slow(plan: Any) -> Engine:
    """A target that takes its time where a stream would be over before its server is."""
    engine: Engine = waiting(open_toy("toy"), lambda: time.sleep(0.001 * (plan is ALONE)))
    return engine


def test_addresses_where_nobody_is_cost_no_token(start: Start) -> None:
    addresses = ["127.0.0.1:9", start().address, f"[::1]:{free_port()}"]
    with closing(skydraft.connect(addresses)) as cloud:
        for _ in range(4):
            assert begin(cloud).run().token_ids == undisturbed()
        assert cloud.info().model == "toy"


@pytest.mark.parametrize("fallback", ["lost", "start"])
def test_nothing_is_opened_ahead_where_no_server_is_reached(fallback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[OwnText]()
    monkeypatch.setattr(OwnText, "open", lambda text, waiting: opened.append(text))
    address, may_begin = f"127.0.0.1:{free_port()}", nullcontext() if fallback == "start" else pytest.raises(CloudLost)
    with closing(skydraft.connect(address, open_ahead=True, fallback=fallback)) as cloud, may_begin:
        begin(cloud, GATED).close()
    assert not opened


def test_without_any_server_a_gated_text_goes_on_alone_and_takes_the_first_that_comes(
    start: Start, unhurried: None
) -> None:
    ports, lines = [free_port(), free_port()], list[str]()
    names = ",".join(f"127.0.0.1:{port}" for port in ports)
    with closing(skydraft.connect(names, notify=lines.append, fallback="start")) as cloud:
        generation = begin(cloud, GATED, replace(PARAMS, max_new_tokens=400, min_new_tokens=400))
        server = None
        for done, _ in generation.rounds():
            if done.record.outcome == "fallback" and server is None:
                assert f"The cloud at {names} was not reached (" in lines[-1] and lines[-1].count("no connection") == 2
                server = start(port=ports[1])
            if done.record.outcome == "fallback":
                time.sleep(0.1)  # it is looked for now and then
        assert generation.origins[0] == "edge-fallback" and "recovered" in generation.origins
        assert len(generation.token_ids) == 400
        assert [line for line in lines if "The cloud is back" in line] == lines[1:] and len(lines) == 2


@pytest.mark.parametrize("require", [False, True])
def test_without_any_server_what_must_be_verified_fails_with_one_line_that_names_all(require: bool) -> None:
    names = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with closing(skydraft.connect(names, timeout_s=1, require=require)) as cloud:
        with pytest.raises(CloudTimeout) as caught:
            begin(cloud, GATED if require else LOSSLESS).run()
        with pytest.raises(CloudTimeout, match=r"did not answer for 1.0 s"):
            cloud.info()
    for part in (f"The cloud at {names} did not answer", f"doctor --cloud {names}"):
        assert part in str(caught.value)
    assert re.search("refused|no answer in time", str(caught.value))  # late on a busy machine
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
def test_a_silent_server_is_left_for_another_one_long_before_patience_ends(plan: Any, unhurried: None) -> None:
    """Stopped processes accept connections and say nothing."""
    servers = [Process(), Process()]
    try:
        with closing(skydraft.connect([each.address for each in servers], timeout_s=PATIENCE_S)) as cloud:
            servers[0].signal(signal.SIGSTOP)
            began = time.monotonic()
            for _ in range(2):
                assert begin(cloud, plan).run().token_ids == undisturbed(plan)
            assert time.monotonic() - began < PATIENCE_S
    finally:
        for each in servers:
            each.kill()


# --- Servers that are not alike


ODD: dict[str, tuple[Callable[[], Engine], dict[str, Any]]] = {
    "model": (lambda: open_toy("toy:drift=0.4"), {}),
    "execution": (lambda: open_toy("toy"), {"execution": "throughput"}),
}


@pytest.mark.parametrize("what", ODD)
def test_all_texts_go_to_servers_that_run_what_the_first_one_that_was_met_runs(start: Start, what: str) -> None:
    engine, options = ODD[what]
    servers = [start(), start(engine(), **options)]
    with closing(connected(servers)) as cloud:
        seen = set()
        for plan in [LOSSLESS, GATED] * 5:
            generation = begin(cloud, plan)
            for done, _ in generation.rounds():
                if done.record.outcome == "verified":
                    break
            there, _ = home(servers)
            seen.add(there.address)
            assert "edge-fallback" not in generation.origins
            generation.close()
            there.wait_until(lambda there=there: not there.num_sessions)  # type: ignore[misc]
    assert len(seen) == 1


def test_a_server_of_another_vocabulary_gets_no_text(start: Start) -> None:
    foreign: Engine = toys.toy(4)
    servers = [start(), start(foreign)]
    with closing(connected(servers)) as cloud:
        for plan in [LOSSLESS, GATED, ALONE] * 3:
            assert begin(cloud, plan).run().token_ids == undisturbed(plan)
    with closing(connected(servers[1:])) as cloud, pytest.raises(VocabularyMismatch):
        begin(cloud).run()


# --- Getting in


def test_a_server_that_refuses_the_token_is_left_out_and_all_of_them_are_an_error(
    start: Start, tmp_path: Path, unhurried: None
) -> None:
    files = [tmp_path / "ours", tmp_path / "theirs"]
    files[0].write_text(TOKENS)
    files[1].write_text("other another-token-of-24-chars\n")
    servers = [start(token_file=each) for each in files]
    with closing(connected(servers, token=TOKENS.split()[1])) as cloud:
        for plan in [LOSSLESS, GATED] * 3:
            assert begin(cloud, plan).run().token_ids == undisturbed(plan)
        files[0].write_text("other another-token-of-24-chars\n")
        time.sleep(1.1)  # the file is looked at once a second
        for plan in (LOSSLESS, GATED):
            with pytest.raises(NotAuthorized):
                begin(cloud, plan).run()


@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
def test_of_a_wrong_token_and_a_dead_server_both_are_said(
    start: Start, tmp_path: Path, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order they are tried: the token is the fault that waiting does not cure."""
    (tmp_path / "theirs").write_text("other another-token-of-24-chars\n")
    wrong, dead = start(token_file=tmp_path / "theirs").address, f"127.0.0.1:{free_port()}"
    token = TOKENS.split()[1]
    for first in (wrong, dead):
        in_order = partial(sorted, key=lambda each, first=first: each.address != first)
        monkeypatch.setattr(Servers, "in_order", lambda self, key, in_order=in_order: in_order(self.all))
        with (
            closing(skydraft.connect([wrong, dead], token=token, timeout_s=PATIENCE_S)) as cloud,
            pytest.raises(NotAuthorized) as found,
        ):
            begin(cloud, plan).run()
        said = found.value.message
        assert f"{dead}: " in said and f"{wrong}: " in said and "refused" in said and said.count(dead) < 3, said


# --- Processes that are killed, stopped, drained and started again


def test_texts_of_one_cloud_are_the_undisturbed_ones_while_servers_come_and_go() -> None:
    """Of gated ones, those that were never without any server; the others are as long."""
    found, done = faults(24, num_faults=6, pause_s=1.5)
    assert len(found) >= 24 and sum(done.values()) >= 6
    undisturbed = {(plan, seed): written(plan, seed, open_toy("toy")).token_ids for plan, seed, _ in found}
    for plan, seed, text in found:
        if plan == "gated" and "edge-fallback" in text.origins:
            assert len(text.token_ids) == len(undisturbed[plan, seed])
        else:
            assert text.token_ids == undisturbed[plan, seed], (plan, seed)
