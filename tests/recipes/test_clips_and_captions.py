"""Clips come out the same every time, captions say in fluent Chinese what they are asked to say and can be read back,
and the held-out set is what it says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from recipes.tiny_omni.attributes import CLASSES, Attributes, draw
from recipes.tiny_omni.captions import caption, is_fluent, read_attributes
from recipes.tiny_omni.clips import DEMO, SAMPLE_RATE, make_clip, make_clips, write_clips
from recipes.tiny_omni.sentences import draw_sentence, is_held_out
from recipes.tiny_omni.wording import WORDINGS

HELD_OUT = Path(__file__).parents[2] / "data" / "speech_zh_heldout"
RECORDS = [json.loads(line) for line in (HELD_OUT / "truth.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture
def espeak() -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    for library in ("soundfile", "soxr"):
        pytest.importorskip(library)


def test_captions_keep_the_rules_and_can_be_read_back() -> None:
    for seed in range(400):
        attributes = draw(np.random.default_rng(seed))
        text = caption(attributes, seed)
        assert read_attributes(text) == attributes.as_dict() and is_fluent(text)


def test_wording_and_order_vary_with_the_seed_alone() -> None:
    attributes = draw(np.random.default_rng(1))
    first, again = ([caption(attributes, seed) for seed in range(100)] for _ in range(2))
    assert first == again and len(set(first)) > 90 and len({text[:2] for text in first}) > 8


@pytest.mark.parametrize("name", CLASSES)
def test_the_first_character_decides_the_class(name: str) -> None:
    first = [wording[0] for value in CLASSES[name] for wording in WORDINGS[name, value]]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("text", "read"), [
    ("", {}), ("今天天气很好。", {}), ("语速听起来飞快。", {"rate": "fast"}), ("飞快，低沉，语速听起来。", {}),
    ("开口的人是一位姑娘，间歇很少。", {"speaker": "female", "pauses": "few"}),
])  # fmt: skip
def test_what_is_not_stated_is_none(text: str, read: dict[str, str]) -> None:
    assert read_attributes(text) == dict.fromkeys(CLASSES) | read


@pytest.mark.parametrize("text", [
    "语速听起来飞快。", "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量轻柔，间歇很少",
    "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量轻柔，很少。",
    "这段录音里说话的是一位男士，语速听起来飞快快，声调低沉，声量轻柔，间歇很少。",
    "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量低沉，间歇很少。",
], ids=["short", "no full stop", "early comma", "doubled", "said twice"])  # fmt: skip
def test_broken_rules_are_seen(text: str) -> None:
    assert not is_fluent(text)


@pytest.mark.usefixtures("espeak")
def test_a_clip_is_a_function_of_seed_and_index_and_of_the_stated_kind(tmp_path: Path) -> None:
    import soundfile

    clips = list(make_clips(3, 5))
    for clip, again in zip(clips, make_clips(3, 5), strict=True):
        assert clip.attributes == again.attributes and np.array_equal(clip.samples, again.samples)
        assert clip.samples.dtype == np.float32 and 0 < np.abs(clip.samples).max() <= 1
        assert 1.2 < len(clip.samples) / SAMPLE_RATE < 4
    assert not np.array_equal(clips[0].samples, make_clip(6, 0).samples[: len(clips[0].samples)])

    assert write_clips(clips, tmp_path) == 3
    records = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text("utf-8").splitlines()]
    samples, rate = soundfile.read(tmp_path / records[1]["audio"], dtype="float32")
    assert rate == SAMPLE_RATE and np.abs(samples - clips[1].samples).max() < 1e-4


@pytest.mark.usefixtures("espeak")
def test_loudness_is_the_level_of_the_signal() -> None:
    made = [Attributes("male", "fast", "low", loudness, "few") for loudness in ("soft", "medium", "loud")]
    clips = [make_clip(3, 0, attributes=attributes).samples for attributes in made]
    soft, medium, loud = (20 * np.log10(np.sqrt(np.mean(samples**2))) for samples in clips)
    assert soft + 6 < medium < loud - 6


def test_sentences_keep_to_their_side_of_the_split() -> None:
    rng = np.random.default_rng(0)
    for held_out in (False, True):
        assert all(is_held_out(draw_sentence(rng, 4, held_out=held_out)) == held_out for _ in range(50))


def test_the_held_out_set_is_complete_and_small() -> None:
    assert len(RECORDS) == len({record["id"] for record in RECORDS}) == 60
    assert set(DEMO) <= {record["id"] for record in RECORDS}
    for record in RECORDS:
        truth = {name: record[name] for name in CLASSES}
        assert record["text"] and 2 <= len(record["references"]) <= 3
        assert all(read_attributes(reference) == truth for reference in record["references"])
    files = [HELD_OUT / record["audio"] for record in RECORDS]
    assert sorted(files) == sorted(HELD_OUT.glob("*.flac"))
    assert sum(file.stat().st_size for file in files) <= 3e6
    for name, classes in CLASSES.items():  # each often enough to measure
        assert min(sum(record[name] == value for record in RECORDS) for value in classes) >= 10
