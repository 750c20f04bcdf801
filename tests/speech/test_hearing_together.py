"""Speech through the whole system on toys that hear: what is drafted, judged and shared."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Engine, Generation, decoding_params, make_plan
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


def begun(
    plan: str, edge: Engine, target: Engine | Cloud, heard: Audio, params: DecodingParams, **more: Any
) -> Generation:
    more |= {"edge": edge, "cloud": target, "plan": PLANS[plan], "params": params, "audio": heard}
    return skydraft.generate(PROMPT, raw=True, **more)


def run(*given: Any, **more: Any) -> Generation:
    return begun(*given, **more).run()


@law(50)
@given(st.integers(0, 50), st.sampled_from(sorted(PLANS)), st.sampled_from(PARAMS))
def test_f16_remote_is_local_and_each_side_encodes_once(cloud: Cloud, seed: int, plan: str, params: Any) -> None:
    """And lossless is the target that hears, alone."""
    edge, near, heard = HearingToy(SEED, 0.3), HearingToy(SEED), recording(seed)
    there = run(plan, edge, cloud, heard, params)
    here = run(plan, edge, near, heard, params)
    assert (edge.num_encoded, near.num_encoded) == (2 * PLANS[plan].drafts, int(here.stats.num_escalated > 0))
    assert (there.token_ids, there.origins, there.finish_reason) == (here.token_ids, here.origins, here.finish_reason)
    if plan == "lossless":
        assert here.token_ids == run("cloud", edge, near, heard, params).token_ids
    shared = there.stats.shared_bytes
    if plan != "edge" and there.stats.num_escalated:
        assert shared == 2 * 4 * 12 and there.stats.bytes_up > shared
    else:
        assert there.stats.bytes_up < 400


def test_a_session_that_is_lost_hears_the_recording_again(cloud: Cloud) -> None:
    with serving(HearingToy(SEED)) as server, closing(skydraft.connect(server.address)) as connection:
        generation = begun("lossless", HearingToy(SEED, 0.4), connection, recording(3), PARAMS[0])
        for number, _ in enumerate(generation.rounds()):
            if number == 2:
                server.forget_sessions()
    assert generation.token_ids == run("cloud", HearingToy(SEED), HearingToy(SEED), recording(3), PARAMS[0]).token_ids


def test_who_cannot_hear_says_so() -> None:
    deaf, hearing = toys.toy(SEED), HearingToy(SEED)
    for plan, edge, target in (("edge", deaf, hearing), ("lossless", hearing, deaf)):
        with pytest.raises(PromptError, match=r"takes no audio\. Use a Qwen2\.5-Omni"):
            run(plan, edge, target, recording(1), PARAMS[0])
    for plan in sorted(PLANS.keys() - {"edge"}):
        with pytest.raises(OptionError, match="does not hear a recording cannot check"):
            run(plan, hearing, hearing, recording(1), PARAMS[0], share_audio="none")
    assert run("edge", hearing, deaf, recording(1), PARAMS[0], share_audio="none").token_ids


def test_a_long_recording_fits_into_a_message_where_the_target_hears() -> None:
    """More than the 256 KiB that messages of ids may have."""
    heard = recording(1, 40_000)  # frames of 4 mels: 320 kB
    edge, target = (HearingToy(SEED, drift, context_len=20_000) for drift in (0.3, 0.0))
    with serving(target, max_prompt=20_000) as server, closing(skydraft.connect(server.address)) as connection:
        generation = run("lossless", edge, connection, heard, decoding_params(max_new_tokens=8))
    assert generation.stats.shared_bytes == 320_000 and generation.stats.bytes_up > 320_000
