"""Speech through the whole system on toys that hear: what is drafted, judged and shared."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Engine, Generation, decoding_params, make_plan
from skydraft.decoding.plan import Plan
from skydraft.edge.cloud import Cloud
from skydraft.errors import OptionError, PromptError
from skydraft.prompts.audio import Audio

from .. import toys
from ..serving import serving
from ..toys import PROMPT, law
from .hearing import HearingToy, samples

SEED = 17
PARAMS = (decoding_params(max_new_tokens=24), decoding_params(max_new_tokens=24, temperature=0.8, seed=5))
PLANS = {"edge": make_plan("edge"), "cloud": make_plan("cloud"), "lossless": make_plan("lossless", k=3),
         "gated": make_plan(gate="entropy:1.5", k=4)}  # fmt: skip


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with serving(HearingToy(SEED)) as server, closing(skydraft.connect(server.address)) as connection:
        yield connection


def recording(seed: int, num_frames: int = 12) -> Audio:
    return Audio(samples(seed, num_frames))


def run(
    plan: str | Plan, edge: Engine, target: Engine | Cloud, heard: Audio, params: DecodingParams, **more: Any
) -> Generation:
    plan = PLANS[plan] if isinstance(plan, str) else plan
    more |= {"edge": edge, "cloud": target, "plan": plan, "params": params, "audio": heard}
    return skydraft.generate(PROMPT, raw=True, **more).run()


@law(50)
@given(
    st.integers(0, 50), st.sampled_from(sorted(PLANS)), st.sampled_from(["features", "none"]), st.sampled_from(PARAMS)
)
def test_remote_is_local_with_speech(cloud: Cloud, seed: int, plan: str, share: Any, params: Any) -> None:
    """And lossless is the target that hears alone."""
    edge, heard = HearingToy(SEED, 0.3), recording(seed)
    if share == "none" and plan == "cloud":
        return
    there = run(plan, edge, cloud, heard, params, share_audio=share)
    here = run(plan, edge, HearingToy(SEED), heard, params, share_audio=share)
    assert (there.token_ids, there.origins, there.finish_reason) == (here.token_ids, here.origins, here.finish_reason)
    if plan == "lossless" and share == "features":
        assert here.token_ids == run("cloud", edge, HearingToy(SEED), heard, params).token_ids
    shared = there.stats.shared_bytes
    if share == "features" and plan != "edge" and there.stats.num_escalated:
        assert shared == 2 * 4 * 12 and there.stats.bytes_up > shared
    else:
        assert there.stats.bytes_up < 400


@law(30)
@given(st.integers(0, 50), st.integers(4, 40), st.sampled_from(PARAMS), st.integers(1, 6))
def test_a_target_that_shares_nothing_judges_as_one_that_was_asked_the_words(
    seed: int, num_frames: int, params: Any, k: int
) -> None:
    """With the gate at always the text is the target's own, told the words alone, wherever its tokens stand."""
    edge, target, heard = HearingToy(SEED, 0.3), HearingToy(SEED), recording(seed, num_frames)
    judged = run(make_plan("lossless", k=k), edge, target, heard, params, share_audio="none")
    words = skydraft.generate(PROMPT, cloud=target, plan=make_plan("cloud"), params=params, raw=True).run()
    assert judged.token_ids == words.token_ids
    assert target.num_encoded == 0 and edge.num_encoded == 1


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_f16_each_side_encodes_a_recording_once_in_every_mode(plan: str) -> None:
    edge, target = HearingToy(SEED, 0.4), HearingToy(SEED)
    generation = run(plan, edge, target, recording(3), PARAMS[0])
    drafts, verifies = PLANS[plan].drafts, generation.stats.num_escalated > 0
    assert (edge.num_encoded, target.num_encoded) == (int(drafts), int(verifies))


def test_a_session_that_is_lost_hears_the_recording_again(cloud: Cloud) -> None:
    with serving(HearingToy(SEED)) as server, closing(skydraft.connect(server.address)) as connection:
        generation = skydraft.generate(
            PROMPT, edge=HearingToy(SEED, 0.4), cloud=connection, plan=PLANS["lossless"], params=PARAMS[0], raw=True,
            audio=recording(3),
        )  # fmt: skip
        for number, _ in enumerate(generation.rounds()):
            if number == 2:
                server.forget_sessions()
    assert generation.token_ids == run("cloud", HearingToy(SEED), HearingToy(SEED), recording(3), PARAMS[0]).token_ids


def test_who_cannot_hear_says_so() -> None:
    deaf, hearing = toys.toy(SEED), HearingToy(SEED)
    with pytest.raises(PromptError, match=r"takes no audio\. Use a Qwen2\.5-Omni"):
        run("edge", deaf, hearing, recording(1), PARAMS[0])
    with pytest.raises(PromptError, match="takes no audio"):
        run("lossless", hearing, deaf, recording(1), PARAMS[0])
    assert run("lossless", hearing, deaf, recording(1), PARAMS[0], share_audio="none").token_ids
    with pytest.raises(OptionError, match="no model would hear"):
        run("cloud", hearing, hearing, recording(1), PARAMS[0], share_audio="none")


def test_a_long_recording_fits_into_a_message_where_the_target_hears() -> None:
    """More than the 256 KiB that messages of ids may have."""
    heard = recording(1, 40_000)  # frames of 4 mels: 320 kB
    with serving(HearingToy(SEED, context_len=20_000), max_prompt=20_000) as server:
        connection = skydraft.connect(server.address)
        edge = HearingToy(SEED, 0.3, context_len=20_000)
        generation = run("lossless", edge, connection, heard, decoding_params(max_new_tokens=8))
        connection.close()
    assert generation.stats.shared_bytes == 320_000 and generation.stats.bytes_up > 320_000
