"""What a round says it cost on the link: every message of it, answered or not, once."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.context import Context
from skydraft.decoding.plan import Plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.edge.verifier import RemoteVerifier
from skydraft.errors import CloudError
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message
from skydraft.types import DraftBlock, LinkCost, Prompt

from .. import toys
from ..serving import PATIENCE_S, Relay, Serving, asked, serving
from ..speech.hearing import NUM_MELS, HearingToy, samples
from ..toys import PROMPT, PROMPT_IDS, VOCAB

PARAMS = DecodingParams(max_new_tokens=40, min_new_tokens=40)
GATED = make_plan(gate="entropy:1.0", k=4)
BLOCK = DraftBlock(0, (1, 2, 3))
NUM_FRAMES = 12
SHARED_BYTES = 2 * NUM_MELS * NUM_FRAMES


@pytest.fixture
def relay() -> Iterator[Relay]:
    with serving(toys.toy(4)) as server, Relay(server.address) as running:
        yield running


def num_bytes(messages: list[tuple[str, bytes]]) -> int:
    """Bytes of all messages of a session but that of its end, when the text is complete."""
    return sum(len(data) for name, data in messages if name in ("open", "verify", "stop"))


def test_a_verification_that_failed_is_counted_and_so_is_the_next_one(relay: Relay, unhurried: None) -> None:
    lines: list[str] = []
    cloud = skydraft.connect(relay.address, timeout_s=PATIENCE_S, notify=lines.append)
    cloud.ping(PATIENCE_S)
    prompt = Prompt(tuple(PROMPT_IDS))
    verifier = cloud.verifier(Context(prompt), prompt, VOCAB, GenerateRequest((Message("user", PROMPT),), GATED))
    relay.is_down = True
    relay.requests.clear()
    with pytest.raises(CloudError):
        verifier.verify(BLOCK, ())
    failed = verifier.take_cost()
    assert failed.bytes_up > 0 and len(relay.requests) > 2  # it was asked again
    for _ in range(30):
        with pytest.raises(CloudError) as caught:
            verifier.verify(BLOCK, ())  # at once, and without a message
    assert len(caught.traceback) < 5  # no round keeps its frames
    assert verifier.take_cost() == LinkCost()
    relay.is_down = False
    Serving.wait_until(lambda: is_back(verifier))
    mended = verifier.take_cost()
    assert failed.bytes_up + mended.bytes_up == num_bytes(relay.requests)
    assert mended.bytes_down == num_bytes(relay.replies) and ["gone" in line for line in lines] == [True, False]
    verifier.close()
    cloud.close()


def is_back(verifier: RemoteVerifier) -> bool:
    with suppress(CloudError):
        return bool(verifier.verify(BLOCK, ()))
    return False


def test_the_records_of_a_run_that_falls_back_hold_every_byte(relay: Relay, unhurried: None) -> None:
    cloud = skydraft.connect(relay.address)
    generation = skydraft.generate(PROMPT, edge=toys.toy(4, 0.7), cloud=cloud, plan=GATED, params=PARAMS, raw=True)
    for done, _ in generation.rounds():
        relay.is_down = relay.is_down or done.record.outcome == "verified"
    records, stats = generation.records, generation.stats
    fallback = [record.link for record in records if record.outcome == "fallback"]
    assert len(fallback) > 1 and generation.finish_reason == "length"
    assert fallback[0].bytes_up > 0 and fallback[0].rtt_ms > 0
    assert fallback[1:] == [LinkCost()] * len(fallback[1:])
    assert (stats.bytes_up, stats.bytes_down) == (num_bytes(relay.requests), num_bytes(relay.replies))
    cloud.close()


def heard_by(cloud: Cloud, plan: Plan, params: DecodingParams) -> Generation:
    edge, heard = HearingToy(17, 0.4), Audio(samples(3, NUM_FRAMES))
    return skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True, audio=heard)


def openings_with_speech(relay: Relay) -> int:
    calls: list[Any] = [asked(data) for name, data in relay.requests if name in ("open", "verify")]
    return sum(call.opening is not None and call.opening.prompt.media != () for call in calls)


@pytest.mark.parametrize("num_lost", [0, 2])
@pytest.mark.parametrize("plan", [make_plan(k=3), GATED, make_plan("cloud")], ids=["lossless", "gated", "cloud"])
def test_features_are_shared_once_with_each_opening_that_is_sent(plan: Any, num_lost: int) -> None:
    params = DecodingParams(max_new_tokens=60, min_new_tokens=60)
    with serving(HearingToy(17)) as server, Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address, require=True)
        generation = heard_by(cloud, plan, params)
        num_left = num_lost
        for done, _ in generation.rounds():
            if num_left and done.record.outcome == "verified":
                num_left -= 1
                server.forget_sessions()
        stats = generation.stats
        assert stats.shared_bytes == SHARED_BYTES * openings_with_speech(relay) and stats.bytes_up > stats.shared_bytes
        if plan.drafts:  # what is streamed may all have been sent before
            assert openings_with_speech(relay) == 1 + num_lost
            shared = [record.link.shared_bytes for record in generation.records if record.link.shared_bytes]
            assert shared == [SHARED_BYTES] * (1 + num_lost)
        cloud.close()
