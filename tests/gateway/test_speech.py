"""Speech in a chat: heard with the turn that holds it, refused where nobody hears."""

import base64
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions
from skydraft.config import CAPTION_PROMPT
from skydraft.gateway import requests
from skydraft.gateway.chats import ChatRequest
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.requests import Defaults
from skydraft.prompts.audio import load_audio

from ..serving import serving
from .running import Running, gateway

CLIPS = sorted((Path(__file__).parents[2] / "data" / "speech_zh_heldout").glob("*.flac"))[:8]
CLIP, OTHER = CLIPS[:2]
DATA = base64.b64encode(CLIP.read_bytes()).decode()


def part(data: str = DATA, kind: str = "flac") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


@pytest.fixture(scope="module")
def hearing() -> Iterator[Running]:
    pytest.importorskip("torch")
    options = EngineOptions(max_sequences=4, context_len=1024)
    with (
        skydraft.load("tiny-omni-edge", options) as edge,
        skydraft.load("tiny-omni-cloud", options) as cloud,
        gateway(Pair(edge, cloud)) as running,
    ):
        yield running


def test_each_turn_may_be_spoken_and_is_heard_as_by_the_python_interface(hearing: Running) -> None:
    pair, params = hearing.gateway.pair, DecodingParams(max_new_tokens=30)
    caption, answer = {"type": "text", "text": CAPTION_PROMPT}, {"role": "assistant", "content": "好。"}

    def spoken(clip: Path, *more: Any) -> dict[str, Any]:
        return {"role": "user", "content": [part(base64.b64encode(clip.read_bytes()).decode()), *more]}

    def heard(clip: Path) -> dict[str, Any]:
        return {"role": "user", "content": CAPTION_PROMPT, "audio": load_audio(clip)}

    def asked(*talk: Any) -> Any:
        reply = hearing.chat([*talk], model="skydraft-lossless", max_tokens=30).json()
        return reply["choices"][0]["message"]["content"]

    for talk, said in (
        ([spoken(CLIP)], [heard(CLIP)]), ([spoken(CLIP, caption)], [heard(CLIP)]),
        ([spoken(CLIP), answer, spoken(OTHER)], [heard(CLIP), answer, heard(OTHER)]),
    ):  # fmt: skip
        alone = skydraft.generate(messages=said, edge=pair.edge, cloud=pair.cloud, params=params).run()
        assert asked(*talk) == asked(*talk) == alone.text != ""
    assert len({asked(spoken(CLIP), answer, spoken(clip)) for clip in CLIPS}) > 1, "what is said last must matter"


@pytest.mark.parametrize(("content", "says"), [
    ([part("not base64!")], "Base64"), ([part(""), part()], "cannot be read"),
    ([part(kind="aac")], "messages.0.content.0.input_audio.format"),
])  # fmt: skip
def test_broken_recordings_are_refused(hearing: Running, content: Any, says: str) -> None:
    reply = hearing.chat(content)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]


def test_recordings_of_one_request_last_a_quarter_of_an_hour_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may be tiny as a file: eighty took 1.5 GB."""
    read: list[bytes] = []
    minutes = SimpleNamespace(duration_s=240.0)
    monkeypatch.setattr(requests, "audio_from_bytes", lambda data: read.append(data) or minutes)
    body = ChatRequest.model_validate({"model": "skydraft", "messages": [{"role": "user", "content": [part()] * 80}]})
    hears: Any = SimpleNamespace(takes_audio=True)
    with pytest.raises(Refusal, match="more than 900 s"):
        requests.order_of(body.to_ask(), hears, hears, Defaults(DecodingParams()))
    assert len(read) == 4


def test_over_a_link_nothing_of_a_voice_is_sent_unless_that_was_said(hearing: Running) -> None:
    pair = hearing.gateway.pair
    assert isinstance(pair.cloud, skydraft.Engine)
    with serving(pair.cloud, max_sessions=2) as server, closing(skydraft.connect(server.address)) as cloud:
        for share, shares in (("none", False), ("features", True)):
            defaults = Defaults(DecodingParams(), share_audio=share)  # type: ignore[arg-type]
            with gateway(Pair(pair.edge, cloud), defaults=defaults) as running:
                for model in ("skydraft", "skydraft-quality", "skydraft-cloud"):
                    reply = running.chat([part()], model=model, max_tokens=8)
                    assert reply.status_code == (200 if shares else 400)
                    assert shares or "--share-audio features" in reply.json()["error"]["message"]
                reply = running.chat([part()], model="skydraft-edge", max_tokens=8).json()
                assert reply["skydraft"]["stats"]["shared_bytes"] == 0
