"""Which of several servers are used: those that are alike, that take the token, and that show the right certificate."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

import skydraft
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import NotAuthorized, ServersDiffer

from .. import toys
from ..serving import Serving, free_port
from .several_servers import ALONE, GATED, LOSSLESS, PARAMS, TEXT, Start, begin, connected, towards, undisturbed

TOKENS = "phone a-token-of-24-characters\n"


# --- Servers that are not alike


def foreign() -> Engine:
    """Another vocabulary."""
    other: Engine = toys.toy(4)
    return other


ODD: dict[str, tuple[Callable[[], Engine], dict[str, Any], str]] = {
    "model": (lambda: open_toy("toy:drift=0.4"), {}, "model: toy:drift=0.4"),
    "vocabulary": (foreign, {}, "vocabulary: toy"),
    "execution": (lambda: open_toy("toy"), {"execution": "throughput"}, "execution: throughput and exact"),
    "context": (lambda: open_toy("toy", 2500), {}, "context: 2500 and 4096"),
    "longest block": (lambda: open_toy("toy"), {"max_block": 7}, "longest block: 7 and "),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
def test_servers_that_differ_are_refused_at_once_by_name(start: Start, what: str, plan: Any) -> None:
    engine, options, says = ODD[what]
    first, odd, third = start(), start(engine(), **options), start()
    with closing(connected([odd, first, third])) as cloud:
        for _ in range(2):  # and again
            towards(cloud, first)
            with pytest.raises(ServersDiffer) as caught:
                begin(cloud, plan).run()
            assert f"{odd.address} and {first.address}" in str(caught.value) and says in str(caught.value)
        with pytest.raises(ServersDiffer):
            cloud.info()


def test_servers_that_were_made_alike_are_used(start: Start) -> None:
    port = free_port()
    first, odd = start(), start(open_toy("toy:drift=0.4"), port=port)
    with closing(connected([first, odd])) as cloud:
        with pytest.raises(ServersDiffer):
            begin(cloud).run()
        odd.stop()
        start(port=port)
        Serving.wait_until(lambda: not cloud._links.fleet._refused)
        assert begin(cloud).run().token_ids == undisturbed()


def test_a_server_that_comes_back_with_another_model_is_left_out_by_name_until_all_have_it(start: Start) -> None:
    ports, lines = [free_port(), free_port()], list[str]()
    servers = [start(port=port) for port in ports]
    with closing(connected(servers, notify=lines.append)) as cloud:
        towards(cloud, servers[0])
        generation = begin(cloud)
        rounds = generation.rounds()
        next(rounds)
        servers[0].stop()
        changed = start(open_toy("toy:drift=0.4"), port=ports[0])
        next(rounds)
        changed.wait_until(lambda: "differ in their model" in lines[-1])
        assert f"The servers {changed.address} and {servers[1].address} differ" in lines[-1]
        for _ in rounds:
            pass
        assert generation.token_ids == undisturbed() and changed.num_sessions == 0
        for _ in range(6):
            assert begin(cloud).run().token_ids == undisturbed()
        servers[1].stop()
        start(open_toy("toy:drift=0.4"), port=ports[1])
        text = begin(cloud).run().token_ids
        target: Engine = open_toy("toy:drift=0.4")
        assert text == skydraft.generate(TEXT, cloud=target, plan=ALONE, params=PARAMS).run().token_ids


def test_a_new_session_is_not_begun_at_a_server_that_changed_unnoticed(start: Start) -> None:
    port = free_port()
    servers = [start(port=port), start()]
    with closing(connected(servers)) as cloud:
        assert begin(cloud).run().token_ids == undisturbed()
        servers[0].stop()
        changed = start(open_toy("toy:drift=0.4"), port=port)
        towards(cloud, changed)
        assert begin(cloud).run().token_ids == undisturbed()


# --- Getting in


def test_a_server_that_refuses_the_token_is_left_out_and_all_of_them_are_an_error(start: Start, tmp_path: Path) -> None:
    files = [tmp_path / "ours", tmp_path / "theirs"]
    files[0].write_text(TOKENS)
    files[1].write_text("other another-token-of-24-chars\n")
    servers, lines = [start(token_file=each) for each in files], list[str]()
    with closing(connected(servers, token=TOKENS.split()[1], notify=lines.append)) as cloud:
        for _ in range(4):
            assert begin(cloud).run().token_ids == undisturbed()
        assert len(lines) == 1 and f"{servers[1].address} is left out" in lines[0] and "token" in lines[0]
    with closing(connected(servers, token="a-token-that-nobody-knows-of")) as cloud:
        for plan in (LOSSLESS, GATED):
            with pytest.raises(NotAuthorized) as caught:
                begin(cloud, plan).run()
            assert all(each.address in str(caught.value) for each in servers)


def test_a_token_that_is_revoked_at_one_server_moves_the_text_to_another(start: Start, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for each in files:
        each.write_text(TOKENS)
    servers = [start(token_file=each) for each in files]
    with closing(connected(servers, token=TOKENS.split()[1])) as cloud:
        towards(cloud, servers[0])
        generation = begin(cloud)
        rounds = generation.rounds()
        next(rounds)
        files[0].write_text("other another-token-of-24-chars\n")
        time.sleep(1.1)  # the file is looked at once a second
        for _ in rounds:
            pass
        assert generation.token_ids == undisturbed() and servers[1].num_sessions <= 1


def test_several_servers_with_one_authority(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    servers = []
    for name in ("a", "b"):
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
        servers.append(start(tls_cert=tmp_path / f"{name}.pem", tls_key=tmp_path / f"{name}.key"))
    with closing(connected(servers, tls_ca=authority.cert_pem.bytes())) as cloud:
        towards(cloud, servers[0])
        generation = begin(cloud)
        for number, _ in enumerate(generation.rounds()):
            if number == 3:
                servers[0].stop()
        assert generation.token_ids == undisturbed()
