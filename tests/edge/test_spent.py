"""What a round says it cost on the link: every message of it, answered or not, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.decoding.context import Context
from skydraft.edge.fleet import Fleet, Links
from skydraft.edge.link import Link, LinkOptions
from skydraft.edge.patience import Patience
from skydraft.edge.verifier import RemoteVerifier
from skydraft.errors import CloudError
from skydraft.prompts.audio import Audio
from skydraft.protocol import codec
from skydraft.protocol.values import Opening
from skydraft.types import DraftBlock, LinkCost, Prompt

from .. import toys
from ..serving import PATIENCE_S, Relay, Serving, Unhurried, asked, serving
from ..speech.hearing import NUM_MELS, HearingToy, samples
from ..toys import PROMPT, PROMPT_IDS, VOCAB

PARAMS = DecodingParams(max_new_tokens=40, min_new_tokens=40)
GATED = make_plan(gate="entropy:1.0", k=4)
BLOCK = DraftBlock(0, (1, 2, 3))
NUM_FRAMES = 12
SHARED_BYTES = 2 * NUM_MELS * NUM_FRAMES


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(toys.toy(4)) as running:
        yield running


@pytest.fixture
def relay(server: Serving) -> Iterator[Relay]:
    with Relay(server.address) as running:
        yield running


def num_bytes(messages: list[tuple[str, bytes]], *, of: str = "") -> int:
    """Bytes of all messages but that of the end, which is sent when the text is complete; or of one kind."""
    return sum(len(data) for name, data in messages if (name == of if of else name != "Close"))


def remote(relay: Relay, patience: Patience, lines: list[str]) -> tuple[RemoteVerifier, Link, Context]:
    links, prompt = Links(Fleet([LinkOptions(relay.address)])), Prompt(tuple(PROMPT_IDS))
    context, opening = Context(prompt), Opening(codec.short_fingerprint(VOCAB.fingerprint), prompt)
    return RemoteVerifier(links, context, opening, patience, notify=lines.append), links.home(1), context


def test_a_verification_that_failed_is_counted_and_so_is_the_next_one(relay: Relay) -> None:
    lines: list[str] = []
    verifier, link, _ = remote(relay, Unhurried(falls_back=True), lines)
    relay.is_down = True
    with pytest.raises(CloudError):
        verifier.verify(BLOCK, ())
    failed = verifier.spent()
    assert failed.bytes_up == num_bytes(relay.requests) > 0 and len(relay.requests) > 2  # it was asked again
    assert failed.bytes_down == num_bytes(relay.replies) == 0 and failed.rtt_ms > 0
    with pytest.raises(CloudError):
        verifier.verify(BLOCK, ())  # at once, and without a message
    assert verifier.spent() == LinkCost()
    relay.is_down = False
    Serving.wait_until(lambda: len(lines) == 2)
    verifier.verify(BLOCK, ())
    mended = verifier.spent()
    assert failed.bytes_up + mended.bytes_up == num_bytes(relay.requests)
    assert mended.bytes_down == num_bytes(relay.replies) and mended.rtt_ms > 0
    assert verifier.spent() == LinkCost()
    verifier.close()
    link.close()


def test_an_opening_that_is_sent_ahead_is_counted_when_it_is_sent_and_its_reply_when_it_is_read(relay: Relay) -> None:
    verifier, link, _ = remote(relay, Patience(), [])
    verifier.open_ahead()
    ahead = verifier.spent()
    verdict = verifier.verify(BLOCK, ())
    assert ahead == LinkCost(bytes_up=num_bytes(relay.requests, of="Open")) and ahead.bytes_up > 0
    later = verifier.spent()
    assert later.bytes_up == num_bytes(relay.requests) - ahead.bytes_up
    assert later.bytes_down == num_bytes(relay.replies) > num_bytes(relay.replies, of="Verify")
    assert verdict.cost.prefill_ms > 0  # of the Open
    verifier.close()
    link.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_the_records_of_a_run_that_falls_back_hold_every_byte(relay: Relay, ahead: bool, unhurried: None) -> None:
    cloud = skydraft.connect(relay.address, open_ahead=ahead)
    generation = skydraft.generate(PROMPT, edge=toys.toy(4, 0.7), cloud=cloud, plan=GATED, params=PARAMS, raw=True)
    for done, _ in generation.rounds():
        relay.is_down = relay.is_down or done.record.outcome == "verified"
    records, stats = generation.records, generation.stats
    fallback = [record.link for record in records if record.outcome == "fallback"]
    assert len(fallback) > 1 and generation.finish_reason == "length"
    assert fallback[0].bytes_up > 0 and fallback[0].rtt_ms > 0
    assert fallback[1:] == [LinkCost()] * len(fallback[1:])
    assert (stats.bytes_up, stats.bytes_down) == (num_bytes(relay.requests), num_bytes(relay.replies))
    num_open = sum(name == "Open" for name, _ in relay.requests)
    assert num_open == ahead and (records[0].link.bytes_up > 0) >= ahead
    cloud.close()


def openings_with_speech(relay: Relay) -> int:
    """How many of the messages that were sent hold an opening with features."""
    calls = [asked(name, data) for name, data in relay.requests if name in ("Open", "Generate", "Verify")]
    return sum(call.opening is not None and call.opening.prompt.media != () for call in calls)


@pytest.mark.parametrize("num_lost", [0, 1, 2])
@pytest.mark.parametrize(
    ("plan", "ahead"),
    [(make_plan(k=3), False), (GATED, False), (GATED, True), (make_plan("cloud"), False)],
    ids=["lossless", "gated", "gated, ahead", "cloud"],
)
def test_features_are_shared_once_with_each_opening_that_is_sent(plan: Any, ahead: bool, num_lost: int) -> None:
    params = DecodingParams(max_new_tokens=60, min_new_tokens=60)
    with serving(HearingToy(17)) as server, Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address, require=True, open_ahead=ahead)
        heard = Audio(samples(3, NUM_FRAMES), 16_000, 1)
        generation = skydraft.generate(
            PROMPT, edge=HearingToy(17, 0.4), cloud=cloud, plan=plan, params=params, raw=True, audio=heard
        )
        num_left = num_lost
        for done, _ in generation.rounds():
            if num_left and done.record.outcome == "verified":
                num_left -= 1
                if plan.drafts:
                    server.forget_sessions()
                else:
                    cloud.link.reconnect()
        stats = generation.stats
        assert stats.shared_bytes == SHARED_BYTES * openings_with_speech(relay) and stats.bytes_up > stats.shared_bytes
        if plan.drafts:  # a stream may have been sent whole before its connection was cut
            assert openings_with_speech(relay) == 1 + num_lost
            shared = [record.link.shared_bytes for record in generation.records if record.link.shared_bytes]
            assert shared == [SHARED_BYTES] * (1 + num_lost)
        cloud.close()


def test_features_of_an_opening_that_got_no_answer_are_shared_too() -> None:
    with serving(HearingToy(17)) as server, Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address)
        relay.is_down = True
        heard = Audio(samples(3, NUM_FRAMES), 16_000, 1)
        given = {"edge": HearingToy(17, 0.4), "cloud": cloud, "plan": GATED, "params": PARAMS}
        generation = skydraft.generate(PROMPT, raw=True, audio=heard, **given).run()  # type: ignore[arg-type]
        assert set(generation.origins) <= {"skipped", "edge-fallback"}
        num_sent = openings_with_speech(relay)
        assert num_sent > 0 and generation.stats.shared_bytes == SHARED_BYTES * num_sent < generation.stats.bytes_up
        cloud.close()


def test_what_is_not_shared_is_not_counted() -> None:
    with serving(HearingToy(17)) as server, Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address, timeout_s=PATIENCE_S)
        heard = Audio(samples(3, NUM_FRAMES), 16_000, 1)
        generation = skydraft.generate(
            PROMPT, edge=HearingToy(17, 0.4), cloud=cloud, params=PARAMS, raw=True, audio=heard, share_audio="none"
        ).run()
        assert generation.stats.shared_bytes == openings_with_speech(relay) == 0 < generation.stats.bytes_up
        cloud.close()
