"""Speech through the whole system: the embedded pair on held-out clips, with a real architecture, trained weights and
no download; and toys that hear, for what is drafted, judged and shared."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Engine, Generation, decoding_params, make_plan
from skydraft.cli.main import run
from skydraft.edge.cloud import Cloud
from skydraft.errors import OptionError, PromptError
from skydraft.prompts.audio import Audio, load_audio

from .. import toys
from ..later import later
from ..serving import serving
from ..toys import PROMPT, law
from .hearing import HearingToy, samples

CLIPS = sorted((Path(__file__).parents[2] / "data" / "speech_zh_heldout").glob("*.flac"))
GREEDY = DecodingParams(max_new_tokens=80)
SEED = 17
PARAMS = (decoding_params(max_new_tokens=24), decoding_params(max_new_tokens=24, temperature=0.8, seed=5))
PLANS = {"edge": make_plan("edge"), "cloud": make_plan("cloud"), "lossless": make_plan("lossless", k=3),
         "gated": make_plan(gate="entropy:1.5", k=4)}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    later("torch")
    later("soundfile")
    with skydraft.load("tiny-omni-edge") as edge, skydraft.load("tiny-omni-cloud") as cloud:
        yield edge, cloud


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with serving(HearingToy(SEED)) as server, closing(skydraft.connect(server.address)) as connection:
        yield connection


def caption(pair: tuple[Any, Any], clip: Path, mode: str, params: DecodingParams = GREEDY, **more: Any) -> Any:
    edge, cloud = pair
    given = {"plan": mode and make_plan(mode, k=5), "params": params, "audio": load_audio(clip)}
    return skydraft.generate(**{"edge": edge, "cloud": cloud} | given | more).run()


def recording(seed: int, num_frames: int = 12) -> Audio:
    return Audio(samples(seed, num_frames))


def begun(
    plan: str, edge: Engine, target: Engine | Cloud, heard: Audio, params: DecodingParams, **more: Any
) -> Generation:
    more |= {"edge": edge, "cloud": target, "plan": PLANS[plan], "params": params, "audio": heard}
    return skydraft.generate(PROMPT, raw=True, **more)


def ended(*given: Any, **more: Any) -> Generation:
    return begun(*given, **more).run()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_cloud_in_process_and_over_the_link(pair: tuple[Any, Any], temperature: float) -> None:
    params = decoding_params(temperature=temperature, seed=3, max_new_tokens=60)
    with serving(pair[1]) as server, closing(skydraft.connect(server.address)) as connection:
        alone, here = (caption(pair, CLIPS[3], mode, params) for mode in ("cloud", "lossless"))
        there = caption(pair, CLIPS[3], "lossless", params, cloud=connection)
        assert there.token_ids == here.token_ids == alone.token_ids
        assert there.stats.bytes_up > there.stats.shared_bytes > 10_000


def test_drafts_save_passes_of_a_checkpoint_that_hears(pair: tuple[Any, Any]) -> None:
    for clip in CLIPS[:4]:
        alone, done = caption(pair, clip, "cloud"), caption(pair, clip, "", plan=make_plan("lossless", k=6))
        assert done.token_ids == alone.token_ids and not done.stats.exact
        assert done.stats.target_passes_per_token <= 0.45


def test_the_command_says_what_left_the_device(pair: tuple[Any, Any], capsys: Any) -> None:
    models = ["--edge-model", "tiny-omni-edge", "--cloud-model", "tiny-omni-cloud"]
    assert run(["generate", "--audio", str(CLIPS[0]), *models, "--mode", "quality", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"].endswith("。") and said["finish_reason"] == "sentences"
    assert said["audio"]["share"] == "features" and said["audio"]["bytes_shared"] == 0
    with serving(pair[1]) as server:
        remote = ["generate", "--audio", str(CLIPS[0]), *models[:2], "--cloud", server.address, "--mode", "lossless"]
        assert run(remote) == 2
        assert "--share-audio features, or use --mode edge" in capsys.readouterr().err
        assert run([*remote, "--share-audio", "features", "--json"]) == 0
        shared = json.loads(capsys.readouterr().out)
        assert shared["audio"]["bytes_shared"] > 10_000 and shared["stats"]["bytes_up"] > 10_000
        assert run([*remote, "--share-audio", "none", "--mode", "edge"]) == 0
        assert "features stayed on this device" in capsys.readouterr().err


def test_a_caption_without_the_server_is_told(pair: tuple[Any, Any], capsys: Any, tmp_path: Path) -> None:
    given = ["caption", "missing.wav", str(CLIPS[0]), "--edge-model", "tiny-omni-edge", "--share-audio", "features"]
    given += ["--system", "用中文。", "-m", "quality", "--out"]
    out = tmp_path / "a.jsonl"
    assert run([*given, str(out), "--cloud", "127.0.0.1:9", "--fallback", "start"]) == 1
    assert re.search(r"(?s)no readable file missing\.wav.*1 of 2 captions", capsys.readouterr().err)
    failed, row = map(json.loads, out.read_text().splitlines())
    assert "error" in failed and row["text"].endswith("。")
    assert row["mode"] == "quality" and not row["exact"] and 0 < row["num_fallback_tokens"] < row["num_tokens"]
    with serving(pair[1]) as server:
        assert run([*given, str(tmp_path / "b.jsonl"), "--cloud", server.address]) == 1
    assert "captions" not in capsys.readouterr().err
    _, row = map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines())
    assert row["num_fallback_tokens"] == 0 < row["target_written_per_token"]
    assert row["cloud_calls_per_token"] > 0 and 0 <= row["acceptance_rate"] <= 1


@law(50)
@given(st.integers(0, 50), st.sampled_from(sorted(PLANS)), st.sampled_from(PARAMS))
def test_f16_remote_is_local_and_each_side_encodes_once(cloud: Cloud, seed: int, plan: str, params: Any) -> None:
    """And lossless is the target that hears, alone."""
    edge, near, heard = HearingToy(SEED, 0.3), HearingToy(SEED), recording(seed)
    there = ended(plan, edge, cloud, heard, params)
    here = ended(plan, edge, near, heard, params)
    assert (edge.num_encoded, near.num_encoded) == (2 * PLANS[plan].drafts, int(here.stats.num_escalated > 0))
    assert (there.token_ids, there.origins, there.finish_reason) == (here.token_ids, here.origins, here.finish_reason)
    if plan == "lossless":
        assert here.token_ids == ended("cloud", edge, near, heard, params).token_ids
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
    assert generation.token_ids == ended("cloud", HearingToy(SEED), HearingToy(SEED), recording(3), PARAMS[0]).token_ids


def test_who_cannot_hear_says_so() -> None:
    deaf, hearing = toys.toy(SEED), HearingToy(SEED)
    for plan, edge, target in (("edge", deaf, hearing), ("lossless", hearing, deaf)):
        with pytest.raises(PromptError, match=r"takes no audio\. Use a Qwen2\.5-Omni"):
            ended(plan, edge, target, recording(1), PARAMS[0])
    for plan in sorted(PLANS.keys() - {"edge"}):
        with pytest.raises(OptionError, match="does not hear a recording cannot check"):
            ended(plan, hearing, hearing, recording(1), PARAMS[0], share_audio="none")
    assert ended("edge", hearing, deaf, recording(1), PARAMS[0], share_audio="none").token_ids


def test_a_long_recording_fits_into_a_message_where_the_target_hears() -> None:
    """More than the 256 KiB that messages of ids may have."""
    heard = recording(1, 40_000)  # frames of 4 mels: 320 kB
    edge, target = (HearingToy(SEED, drift, context_len=20_000) for drift in (0.3, 0.0))
    with serving(target, max_prompt=20_000) as server, closing(skydraft.connect(server.address)) as connection:
        generation = ended("lossless", edge, connection, heard, decoding_params(max_new_tokens=8))
    assert generation.stats.shared_bytes == 320_000 and generation.stats.bytes_up > 320_000
