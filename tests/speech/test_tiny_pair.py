"""The embedded pair on held-out clips: real architecture, trained weights, no download."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, decoding_params, make_plan
from skydraft.cli.main import run
from skydraft.config import CAPTION_PROMPT
from skydraft.prompts.audio import load_audio
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

from ..engines.tiny_omni import heard
from ..later import later
from ..serving import serving

pytestmark = pytest.mark.usefixtures("one_thread")
torch = later("torch")
later("soundfile")

CLIPS = sorted((Path(__file__).parents[2] / "data" / "speech_zh_heldout").glob("*.flac"))
GREEDY = DecodingParams(max_new_tokens=80)


@pytest.fixture(scope="module")
def pair(one_thread: None) -> Iterator[tuple[Any, Any]]:
    with skydraft.load("tiny-omni-edge") as edge, skydraft.load("tiny-omni-cloud") as cloud:
        yield edge, cloud


def caption(pair: tuple[Any, Any], clip: Path, mode: str, params: DecodingParams = GREEDY, **more: Any) -> Any:
    edge, cloud = pair
    given = {"edge": edge, "cloud": cloud, "plan": make_plan(mode), "params": params, "audio": load_audio(clip)} | more
    with skydraft.generate(**given) as generation:
        return generation.run()


@pytest.mark.parametrize("clip", CLIPS[:2], ids=lambda clip: clip.stem)
def test_edge_is_generate_of_transformers_on_the_same_thinker(pair: tuple[Any, Any], clip: Path) -> None:
    edge = pair[0]
    prompt = read_prompt(edge, asked(CAPTION_PROMPT, audio=load_audio(clip))).edge
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

    # A model of its own: the engine has dropped the parts of its model that it does not need.
    thinker = Thinker.from_pretrained(edge.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        given, ends = heard(list(prompt.token_ids), prompt.media), sorted(edge.vocab.end_ids)
        length = GREEDY.max_new_tokens
        output = thinker.generate(
            **given, max_new_tokens=length, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
    expected = tuple(output[0, len(prompt.token_ids) :].tolist())
    assert caption(pair, clip, "edge").token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_cloud_in_process_and_over_the_link(pair: tuple[Any, Any], temperature: float) -> None:
    params = decoding_params(temperature=temperature, seed=3, max_new_tokens=60)
    with serving(pair[1]) as server:
        connection = skydraft.connect(server.address)
        for clip in CLIPS[3:4]:
            alone = caption(pair, clip, "cloud", params)
            assert caption(pair, clip, "lossless", params).token_ids == alone.token_ids
            there = caption(pair, clip, "lossless", params, cloud=connection)
            assert there.token_ids == alone.token_ids
            assert there.stats.bytes_up > there.stats.shared_bytes > 10_000
        connection.close()


def test_the_command_says_what_left_the_device(pair: tuple[Any, Any], capsys: Any, tmp_path: Path) -> None:
    models = ["--edge-model", "tiny-omni-edge", "--cloud-model", "tiny-omni-cloud"]
    assert run(["generate", "--audio", str(CLIPS[0]), *models, "--mode", "quality", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"].endswith("。") and said["finish_reason"] == "sentences"
    assert said["audio"]["share"] == "features" and said["audio"]["bytes_shared"] == 0
    with serving(pair[1]) as server:
        remote = ["generate", "--audio", str(CLIPS[0]), *models[:2], "--cloud", server.address, "--mode", "lossless"]
        assert run(remote) == 2
        assert "--share-audio features, or --share-audio none" in capsys.readouterr().err
        assert run([*remote, "--share-audio", "features", "--json"]) == 0
        shared = json.loads(capsys.readouterr().out)
        assert shared["audio"]["bytes_shared"] > 10_000 and shared["stats"]["bytes_up"] > 10_000
        assert run([*remote, "--share-audio", "none"]) == 0
        assert "judged from the words alone" in capsys.readouterr().err
    assert run(["caption", str(CLIPS[0]), "missing.wav", *models, "--out", str(tmp_path / "a.csv")]) == 1
    assert "no readable file missing.wav" in capsys.readouterr().err
    _, row, _ = (tmp_path / "a.csv").read_text(encoding="utf-8-sig").splitlines()
    assert said["text"][:8] in row
