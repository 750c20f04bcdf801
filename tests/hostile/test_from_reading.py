"""Defects that were found by reading the code, each shown once."""

from __future__ import annotations

import dataclasses
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.cloud.access import Keyring
from skydraft.edge.link import Link, SessionStream
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudFailure, CloudLost, NotAuthorized, PromptError, SessionNotFound
from skydraft.protocol.info import encode_info
from tests.serving import free_port, serving

PARAMS = DecodingParams(max_new_tokens=20, min_new_tokens=20)


def test_an_outage_does_not_keep_the_frames_of_every_round() -> None:
    cloud = skydraft.connect(f"127.0.0.1:{free_port()}", timeout_s=1)
    params = DecodingParams(max_new_tokens=400, min_new_tokens=400)
    generation = skydraft.generate(
        "语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=make_plan("quality"), params=params
    )
    generation.run()
    assert generation.origins.count("edge-fallback") > 50
    error: Any = generation._loop._verifier._outage.error  # type: ignore[union-attr]
    length, frame = 0, error.__traceback__
    while frame is not None:
        length, frame = length + 1, frame.tb_next
    assert length < 20
    cloud.close()


def test_what_a_gated_plan_asks_before_it_begins_takes_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_toy("toy")) as server:
        cloud = skydraft.connect(server.address)

        def silent(self: Link, timeout_s: float = 30.0) -> float:
            time.sleep(min(timeout_s, 5))
            raise CloudLost("no sign of life")

        monkeypatch.setattr(Link, "ping", silent)
        began = time.monotonic()
        with pytest.raises(CloudLost):
            cloud.costs(quick=True)
        assert time.monotonic() - began < 2
        cloud.close()


def test_a_generation_that_cannot_begin_leaves_no_seat_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_toy("toy")) as server:
        cloud = skydraft.connect(server.address, timeout_s=2, open_ahead=True)
        info = server.server.info()
        monkeypatch.setattr(Link, "info", lambda self, timeout_s: (_ for _ in ()).throw(CloudFailure("no")))
        with pytest.raises(CloudFailure):
            skydraft.generate(
                "语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=make_plan("lossless", k="auto"), params=PARAMS
            )
        time.sleep(0.3)
        assert server.server.info().num_sessions == info.num_sessions == 0
        cloud.close()


def test_a_server_that_forgets_every_session_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening feeds the whole prompt again."""
    asked = []
    with serving(open_toy("toy")) as server:
        cloud = skydraft.connect(server.address, timeout_s=1.5)
        sound = Link.call

        def forgotten(self: SessionStream, *waits: float) -> bytes:
            asked.append(time.monotonic())
            raise SessionNotFound("gone")

        def forgets(self: Link, method: str, request: bytes, timeout_s: float, ping_s: float = 5.0) -> bytes:
            if method == "Verify":
                asked.append(time.monotonic())
                raise SessionNotFound("gone")
            return sound(self, method, request, timeout_s)

        monkeypatch.setattr(SessionStream, "receive", forgotten)
        monkeypatch.setattr(Link, "call", forgets)
        monkeypatch.setattr(Link, "call_watched", forgets)
        with pytest.raises(skydraft.errors.CloudError):
            skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, params=PARAMS).run()
        cloud.close()
    assert 3 <= len(asked) <= 12
    assert asked[1] - asked[0] < 0.2  # the first mending is at once


def test_an_id_beyond_the_vocabulary_is_a_wrong_prompt() -> None:
    engine = open_toy("toy")
    for ids in ([engine.vocab.size], [-1], [1, 10**9]):
        with pytest.raises(PromptError, match="outside the vocabulary"):
            engine.check_prompt(ids)


def test_the_metrics_stop_with_the_server_and_are_at_one_path() -> None:
    port = free_port()
    with serving(open_toy("toy"), metrics_port=port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            assert b"skydraft_" in reply.read()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/elsewhere", timeout=5)
        assert caught.value.code == 404
        caught.value.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    with serving(open_toy("toy"), metrics_port=port):
        pass  # the port is free


def test_a_token_that_was_replaced_is_seen_whatever_the_file_says_of_itself(tmp_path: Path) -> None:
    file, now = tmp_path / "tokens", [0.0]
    file.write_text("ann 0123456789abcdef0\n")
    before = file.stat()
    keyring = Keyring(file, lambda: now[0])
    assert keyring.label("Bearer 0123456789abcdef0") == "ann"
    file.write_text("ann 0123456789abcdef1\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now[0] = 2.0
    assert keyring.label("Bearer 0123456789abcdef1") == "ann"
    with pytest.raises(NotAuthorized):
        keyring.label("Bearer 0123456789abcdef0")


@pytest.mark.parametrize("zero", ["max_rows", "max_block", "vocab_size", "context_len", "max_sessions", "forward_ms"])
def test_a_server_that_says_zero_of_itself_is_a_failure_of_its_own(zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_toy("toy", 4096, 2)) as server:
        value: Any = (0.0, 0.0) if zero == "forward_ms" else 0
        said = encode_info(dataclasses.replace(server.server.info(), **{zero: value}))
        sound = Link.call
        monkeypatch.setattr(
            Link, "call", lambda self, method, *rest: said if method == "GetInfo" else sound(self, method, *rest)
        )
        cloud = skydraft.connect(server.address, timeout_s=1)
        with pytest.raises(CloudFailure, match="what cannot be"):
            skydraft.generate(
                "语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=make_plan("lossless", k="auto"), params=PARAMS
            ).run()
        cloud.close()
