"""The embedded pair on held-out clips: real architecture, trained weights, no download."""

import json
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
    given = {"edge": edge, "cloud": cloud, "plan": make_plan(mode), "params": params, "audio": load_audio(clip)} | more
    return skydraft.generate(**given).run()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_cloud_in_process_and_over_the_link(pair: tuple[Any, Any], temperature: float) -> None:
    params = decoding_params(temperature=temperature, seed=3, max_new_tokens=60)
    with serving(pair[1]) as server, closing(skydraft.connect(server.address)) as connection:
        alone, here = (caption(pair, CLIPS[3], mode, params) for mode in ("cloud", "lossless"))
        there = caption(pair, CLIPS[3], "lossless", params, cloud=connection)
        assert there.token_ids == here.token_ids == alone.token_ids
        assert there.stats.bytes_up > there.stats.shared_bytes > 10_000


def test_the_command_says_what_left_the_device(pair: tuple[Any, Any], capsys: Any, tmp_path: Path) -> None:
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
        assert run([*remote, "--share-audio", "none"]) == 2
        assert "does not hear a recording cannot check" in capsys.readouterr().err
        assert run([*remote, "--share-audio", "none", "--mode", "edge"]) == 0
        assert "features stayed on this device" in capsys.readouterr().err
    assert run(["caption", str(CLIPS[0]), "missing.wav", *models, "--out", str(tmp_path / "a.csv")]) == 1
    assert "no readable file missing.wav" in capsys.readouterr().err
    _, row, _ = (tmp_path / "a.csv").read_text(encoding="utf-8-sig").splitlines()
    assert said["text"][:8] in row
