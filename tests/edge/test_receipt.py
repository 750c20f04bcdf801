"""What left this device: a receipt says it to the token, and records to the byte. Both are recomputed here from what a
server got."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.accounts.receipt import Receipt
from skydraft.decoding.builder import prompted
from skydraft.decoding.context import Context
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, OptionError
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import OpenCall, VerifyCall
from skydraft.types import DraftBlock, LinkCost

from ..serving import PATIENCE_S, Relay, asked, free_port, serving
from ..speech.hearing import NUM_MELS, HearingToy, samples
from ..toys import ASKED, PROMPT, VOCAB
from .conftest import begin

PARAMS = DecodingParams(max_new_tokens=48, min_new_tokens=48, temperature=0.8, seed=3)
PLANS = {
    "gated": make_plan(gate="entropy:2.8", k=4), "handed back": make_plan("quality"), "lossless": make_plan(k=4),
    "drafts ahead": make_plan("lossless"), "cloud": make_plan("cloud"), "edge": make_plan("edge"),
}  # fmt: skip


def number_of(relay: Relay, kind: str) -> int:
    return [name for name, _ in relay.requests].count(kind)


def num_bytes(messages: list[tuple[str, bytes]]) -> int:
    """Bytes of all messages of sessions but those of their ends, when the texts are complete."""
    return sum(len(data) for name, data in messages if name in ("open", "verify", "draft", "stop"))


def run(cloud: Any, plan: Any, seed: int = 3) -> Generation:
    return begin(cloud, plan, replace(PARAMS, seed=seed)).run()


def recomputed(messages: list[tuple[str, bytes]], generation: Generation) -> dict[str, Any]:
    calls = [asked(message) for name, message in messages if name in ("open", "verify")]
    got: set[tuple[int, int]] = set()
    num_prompt = 0
    for call in calls:
        assert isinstance(call, OpenCall | VerifyCall)
        if call.opening is not None:
            num_prompt = len(call.opening.prompt.token_ids)
            got |= set(enumerate(call.opening.committed_ids))
        if isinstance(call, VerifyCall):
            got |= set(enumerate((*call.catch_up_ids, *call.draft_ids), call.base - len(call.catch_up_ids)))
    base = 0
    for message in (pb.SessionRequest.FromString(data) for name, data in messages if name == "draft"):
        base = message.base if message.branch else base
        got |= set(enumerate(message.draft_ids, base))
        base += len(message.draft_ids)
    return of_what_came(generation, num_prompt, got, sum(isinstance(call, VerifyCall) for call in calls))


def of_what_came(generation: Generation, num_prompt: int, got: set[tuple[int, int]], num_calls: int) -> dict[str, Any]:
    """The figures, where a server got these tokens at these places."""
    text = list(enumerate(generation.token_ids))
    its_own = [origin in ("recovered", "bonus", "cloud") for origin in generation.origins]
    seen = [at for (at, token_id), mine in zip(text, its_own, strict=True) if mine or (at, token_id) in got]
    return {"prompt": num_prompt, "seen": seen, "rejected": sorted(got - set(text)), "calls": num_calls}


def figures(receipt: Receipt) -> dict[str, Any]:
    return {
        "prompt": receipt.prompt_tokens,
        "seen": [at for span in receipt.seen for at in range(*span.tokens)],
        "rejected": [(each.at, each.token_id) for each in receipt.rejected],
        "calls": receipt.calls,
    }


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_a_receipt_is_what_the_server_got(relay: Relay, plan: Any) -> None:
    with closing(skydraft.connect(relay.address)) as cloud:
        receipts = []
        for seed in range(4):
            relay.requests.clear()
            generation = run(cloud, plan, seed)
            receipts.append(receipt := generation.receipt)
            # Drafts just before the end of the text may be cancelled on their way: sent, and never seen there.
            crosses = plan.verifies and (plan.k is None or plan.back.num_tokens > 0)
            told, came = figures(receipt), recomputed(relay.requests, generation)
            assert told == came or (crosses and told["calls"] == came["calls"])
            assert all({*came[name]} <= {*told[name]} for name in ("seen", "rejected"))
            assert receipt.servers == ((relay.address,) if plan.verifies else ())
            time.sleep(0.1 * crosses)  # else a late one would be taken for one of the next text
            assert 0 <= receipt.bytes_up - num_bytes(relay.requests) <= (200 if crosses else 0)
            for span in receipt.seen:
                text = generation.text[slice(*span.chars)]
                shown = [token.text for token in generation]
                assert text == "".join(shown[slice(*span.tokens)])
        if plan is PLANS["gated"]:  # what these laws speak of does occur
            assert any(receipt.rejected for receipt in receipts)
            assert any(0 < sum(span.tokens[1] - span.tokens[0] for span in each.seen) < 48 for each in receipts)


@pytest.mark.parametrize("plan", [PLANS["gated"], PLANS["lossless"]], ids=["gated", "lossless"])
def test_a_session_that_was_forgotten_or_lost_is_told_with_what_was_sent_again(plan: Any, unhurried: None) -> None:
    with serving(open_toy("toy")) as server, Relay(server.address) as relay:
        cloud = skydraft.connect(relay.address, timeout_s=10)
        with begin(cloud, plan, PARAMS) as generation:
            for number, _ in enumerate(generation.rounds()):
                if number == 2:
                    server.forget_sessions()
                relay.is_down = number == 4 and plan.is_gated
        assert figures(generation.receipt) == recomputed(relay.requests, generation)
        cloud.close()


def test_a_text_without_its_cloud_says_that_nothing_was_sent() -> None:
    with closing(skydraft.connect(f"127.0.0.1:{free_port()}", fallback="start")) as cloud:
        generation = run(cloud, make_plan(gate="entropy:0.1", k=4))
        assert set(generation.origins) == {"edge-fallback"}
        receipt = generation.receipt
        assert (receipt.prompt_tokens, receipt.seen, receipt.rejected, receipt.servers) == (0, (), (), ())
        assert receipt.calls == 0
    local = run(open_toy("toy"), PLANS["lossless"]).receipt
    assert local == Receipt((), 0, (), (), 0, 0, 0, 0, None)


@pytest.mark.parametrize(("most", "num_at_once"), [(1, 1), (3, 1), (2, 6)])
def test_after_the_calls_of_a_day_texts_go_on_alone(relay: Relay, most: int, num_at_once: int) -> None:
    lines: list[str] = []
    with closing(skydraft.connect(relay.address, notify=lines.append, max_calls=most)) as cloud:
        with ThreadPoolExecutor(num_at_once) as pool:
            texts = list(pool.map(lambda seed: run(cloud, PLANS["gated"], seed), range(6)))
        assert number_of(relay, "verify") == sum(text.receipt.calls for text in texts) == most
        assert all(len(text.token_ids) == 48 for text in texts)
        assert 1 <= len(lines) <= len(texts) and all(f"Today's {most} calls are used up" in line for line in lines)
        last = run(cloud, PLANS["gated"])
        assert "edge-fallback" in last.origins and last.receipt.prompt_tokens == 0
        with pytest.raises(skydraft.SkydraftError, match="used up"):
            run(cloud, make_plan("cloud"))
    with pytest.raises(OptionError, match="max_calls must be 1 or more"):
        skydraft.connect("127.0.0.1:1", max_calls=0)


def test_an_opening_ahead_belongs_to_its_first_call(relay: Relay) -> None:
    """It reads the whole prompt, so it is not sent where no call may follow."""
    with closing(skydraft.connect(relay.address)) as cloud:
        num_calls = run(cloud, PLANS["lossless"]).receipt.calls
    assert num_calls == number_of(relay, "verify") and number_of(relay, "open") == 1
    with closing(skydraft.connect(relay.address, max_calls=num_calls)) as cloud:
        assert run(cloud, PLANS["lossless"]).receipt.calls == num_calls
        generation = begin(cloud, PLANS["lossless"], PARAMS)
        time.sleep(0.2)
        generation.close()
    assert (number_of(relay, "open"), number_of(relay, "verify")) == (2, 2 * num_calls)


def test_calls_that_could_not_be_sent_are_not_counted(unhurried: None) -> None:
    port = free_port()
    with closing(skydraft.connect(f"127.0.0.1:{port}", max_calls=1, fallback="start")) as cloud:
        for _ in range(3):
            assert run(cloud, PLANS["gated"]).receipt.calls == 0
        with serving(open_toy("toy"), port=port):
            assert run(cloud, PLANS["gated"]).receipt.calls == 1


# --- To the byte


def test_the_records_of_a_text_that_loses_its_cloud_hold_every_byte_until_it_is_back(
    relay: Relay, unhurried: None
) -> None:
    with closing(skydraft.connect(relay.address)) as cloud:
        generation = begin(cloud, PLANS["gated"], replace(PARAMS, max_new_tokens=2000, min_new_tokens=2000))
        for _ in generation.rounds():
            outcomes = [record.outcome for record in generation.records]
            relay.is_down = "verified" in outcomes and outcomes.count("fallback") < 3
            if not relay.is_down and "fallback" in outcomes:
                time.sleep(0.03)  # it is looked for now and then
                if outcomes[-1] == "verified":
                    break
        assert outcomes[-1] == "verified"  # it is back
        stats, links = generation.stats, [each.link for each in generation.records if each.outcome == "fallback"]
        assert links[0].bytes_up > 0 and links[0].rtt_ms > 0 and links[1:] == [LinkCost()] * len(links[1:])
        assert number_of(relay, "verify") > stats.num_escalated - len(links) + 1  # it was asked again
        assert (stats.bytes_up, stats.bytes_down) == (num_bytes(relay.requests), num_bytes(relay.replies))
        generation.close()


def test_rounds_without_a_cloud_keep_no_frames(relay: Relay) -> None:
    with closing(skydraft.connect(relay.address)) as cloud:
        cloud.ping(PATIENCE_S)
        request = prompted(GenerateRequest((Message("user", PROMPT),), PLANS["gated"]), open_toy("toy"))
        verifier = cloud.verifier(Context(ASKED), VOCAB, request)
        relay.is_down = True
        for _ in range(30):
            with pytest.raises(CloudError) as caught:
                verifier.verify(DraftBlock(0, (1, 2, 3)), ())
        assert len(caught.traceback) < 5
        verifier.close()


NUM_FRAMES = 12


@pytest.mark.parametrize(
    "plan", [PLANS["lossless"], PLANS["gated"], PLANS["cloud"]], ids=["lossless", "gated", "cloud"]
)
def test_features_are_shared_once_with_each_opening_that_is_sent(plan: Any) -> None:
    with (
        serving(HearingToy(17)) as server,
        Relay(server.address) as relay,
        closing(skydraft.connect(relay.address, require=True)) as cloud,
    ):
        heard, params = Audio(samples(3, NUM_FRAMES)), DecodingParams(max_new_tokens=60, min_new_tokens=60)
        given = {"edge": HearingToy(17, 0.4), "cloud": cloud, "plan": plan, "params": params, "raw": True}
        generation = skydraft.generate(PROMPT, audio=heard, **given)
        num_left = 2
        for done, _ in generation.rounds():
            if num_left and done.record.outcome == "verified":
                num_left -= 1
                server.forget_sessions()
        calls: list[Any] = [asked(data) for name, data in relay.requests if name in ("open", "verify")]
        openings = [call.opening for call in calls if call.opening is not None]
        assert all(opening.prompt.media for opening in openings)
        each_bytes, stats = 2 * NUM_MELS * NUM_FRAMES, generation.stats
        assert stats.shared_bytes == each_bytes * len(openings) and stats.bytes_up > stats.shared_bytes
        if plan.drafts:  # what is streamed may all have been sent before
            shared = [record.link.shared_bytes for record in generation.records if record.link.shared_bytes]
            assert shared == [each_bytes] * len(openings) and len(openings) == 3
