"""The embedded pair on held-out clips: real architecture, trained weights, no download."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, decoding_params, make_plan
from skydraft.cli.main import run
from skydraft.prompts.audio import load_audio

from ..later import later
from ..serving import serving

torch = later("torch")
later("soundfile")

CLIPS = sorted((Path(__file__).parents[2] / "data" / "speech_zh_heldout").glob("*.flac"))
GREEDY = DecodingParams(max_new_tokens=80)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    with skydraft.load("tiny-omni-edge") as edge, skydraft.load("tiny-omni-cloud") as cloud:
        yield edge, cloud


def caption(pair: tuple[Any, Any], clip: Path, mode: str, params: DecodingParams = GREEDY, **more: Any) -> Any:
    edge, cloud = pair
    given = {"plan": mode and make_plan(mode, k=5), "params": params, "audio": load_audio(clip)}
    return skydraft.generate(**{"edge": edge, "cloud": cloud} | given | more).run()


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
