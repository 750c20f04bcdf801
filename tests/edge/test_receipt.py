"""A receipt says what left this device, to the token: it is recomputed here from what a server got."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.accounts.receipt import Receipt
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import OpenCall, VerifyCall

from ..serving import Relay, asked, free_port, serving
from .texts import begin

PARAMS = DecodingParams(max_new_tokens=48, min_new_tokens=48, temperature=0.8, seed=3)
PLANS = {
    "gated": make_plan(gate="entropy:2.8", k=4), "handed back": make_plan("quality"), "lossless": make_plan(k=4),
    "drafts ahead": make_plan("lossless"), "cloud": make_plan("cloud"), "edge": make_plan("edge"),
}  # fmt: skip


@pytest.fixture
def relay() -> Iterator[Relay]:
    with serving(open_toy("toy")) as server, Relay(server.address) as running:
        yield running


def number_of(relay: Relay, kind: str) -> int:
    return [name for name, _ in relay.requests].count(kind)


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
            num_bytes = sum(len(message) for name, message in relay.requests if name != "close")
            assert 0 <= receipt.bytes_up - num_bytes <= (200 if crosses else 0)
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


@pytest.mark.parametrize("most", [1, 3])
def test_after_the_calls_of_a_day_texts_go_on_alone(relay: Relay, most: int) -> None:
    lines: list[str] = []
    with closing(skydraft.connect(relay.address, notify=lines.append, max_calls=most)) as cloud:
        texts = [run(cloud, PLANS["gated"], seed) for seed in range(5)]
        assert sum(name == "verify" for name, _ in relay.requests) == most
        assert sum(text.receipt.calls for text in texts) == most
        assert "edge-fallback" in texts[-1].origins and len(texts[-1].token_ids) == 48
        assert texts[-1].receipt.prompt_tokens == 0 or most > 1
        assert lines and all(f"Today's {most} calls are used up" in line for line in lines)
        assert len(lines) <= len(texts)
        with pytest.raises(skydraft.SkydraftError, match="used up"):
            run(cloud, make_plan("cloud"))
    with pytest.raises(OptionError, match="max_calls must be 1 or more"):
        skydraft.connect("127.0.0.1:1", max_calls=0)


def test_texts_at_the_same_time_share_the_calls_of_a_day(relay: Relay) -> None:
    with closing(skydraft.connect(relay.address, max_calls=2)) as cloud:
        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(lambda seed: run(cloud, PLANS["gated"], seed), range(6)))
        assert sum(name == "verify" for name, _ in relay.requests) == 2
        assert all(len(text.token_ids) == 48 for text in texts)


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
