"""The thinker of Qwen2.5-Omni on random weights: one audio encoding, explicit positions, no state on the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.options import EngineOptions
from skydraft.errors import EngineError, PromptError
from skydraft.types import Media, Recordings

from ..later import later
from .contract import TOLERANCE
from .tiny_omni import AUDIO, clip, greedy, heard, spoken, spoken_often

torch = later("torch")
transformers = later("transformers")

TURNS = (1, 0.31), (2, 2.7), (3, 1.3)
# Recordings of a prompt: (seed, seconds); the encoder works in windows of 2.
RECORDINGS = [*([each] for each in enumerate([0.31, 1.3, 2.0, 4.05])), TURNS, TURNS[::-1], []]


@pytest.fixture
def encodings(omni: OmniEngine) -> Iterator[list[int]]:
    """Grows by one entry per run of the audio encoder."""
    runs: list[int] = []
    hook = omni._model.model.audio_tower.register_forward_hook(lambda *_: runs.append(1))
    yield runs
    hook.remove()


@pytest.mark.parametrize("num_samples", [1600, 16_001, 64_159])
def test_features_are_those_of_the_processor_without_its_padding(num_samples: int, omni: OmniEngine) -> None:
    samples = clip(3, 5.0)[:num_samples]
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    padded = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    num_frames = int(padded["attention_mask"].sum())
    media = omni.media(samples)
    assert media.num_frames == num_frames
    assert np.abs(media.features - padded["input_features"][0, :, :num_frames]).max() < 1e-5


def test_media_knows_how_many_tokens_the_encoder_makes(thinker: Any) -> None:
    for num_frames in range(3, 420):
        media = Media(np.zeros((128, num_frames), np.float32))
        expected = thinker.model.audio_tower._get_feat_extract_output_lengths(torch.tensor(num_frames))[1]
        assert media.num_tokens == int(expected)


def test_samples_that_make_no_media(omni: OmniEngine) -> None:
    for samples, message in ((np.zeros(0), "too few"), (np.full(320, 0.1), "2 frames of audio are too few"),
                             (np.full(16_000, np.nan), "must be finite")):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            omni.media(samples.astype(np.float32))


def test_f16_audio_is_encoded_once(omni: OmniEngine, encodings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, media = spoken(omni, 1, 2.7)
    monkeypatch.setattr(omni, "max_batch_rows", 16)  # the prompt goes in by parts
    sequence = omni.open(prompt, media)
    assert len(encodings) == 1
    tokens = greedy(sequence, prompt[-1], 5)
    for length in (len(prompt) - 1, 20, 2, 0):
        sequence.truncate(length)
        sequence.extend([*prompt, *tokens][length : len(prompt)])
        assert greedy(sequence, tokens[0], 4) == tokens[1:]
    assert len(encodings) == 1
    omni.open(prompt, media)
    assert len(encodings) == 2
    omni.open([token_id for token_id in prompt if token_id != omni.vocab.encode(AUDIO)[0]])
    assert len(encodings) == 2


def pieces(engine: OmniEngine, clips: Any) -> Iterator[tuple[list[int], Recordings, int, Any]]:
    """Feed a prompt with audio and 40 tokens piece by piece, with rollbacks, also into the prompt.

    Yields all token ids, the media, and per piece its base and logits [num_rows, vocab.size].
    """
    rng = np.random.default_rng(len(clips))
    prompt, media = spoken_often(engine, *clips)
    prompt = prompt or list(engine.vocab.encode("<|im_start|>今天天气很好"))
    tokens = [*prompt, *rng.integers(10, engine.vocab.size, 40).tolist()]
    sequence = engine.open(prompt, media)
    while sequence.length < len(tokens):
        base = sequence.length
        fed = tokens[base : base + int(rng.integers(1, 6))]
        yield tokens, media, base, sequence.extend(fed)
        if rng.random() < 0.3 and sequence.length < len(tokens):
            sequence.truncate(int(rng.integers(max(sequence.length - 8, 0), sequence.length)))
    for length in (len(prompt) // 2, 1):
        sequence.truncate(length)
        yield tokens, media, length, sequence.extend(tokens[length:])


@pytest.mark.parametrize("clips", RECORDINGS)
def test_f8_pieces_equal_one_forward_at_positions_of_get_rope_index(clips: Any, omni: OmniEngine, thinker: Any) -> None:
    given: list[Any] = []
    hook = omni._model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    expected = None
    try:
        for tokens, media, base, rows in pieces(omni, clips):
            if expected is None:
                with torch.inference_mode():
                    expected = thinker(**heard(tokens, media)).logits[0, :, : omni.vocab.size]
                positions, delta = thinker.get_rope_index(
                    torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                    audio_seqlens=torch.tensor([each.num_frames for each in media]) if media else None,
                )  # fmt: skip
                assert delta.item() == 0
            same = expected[base : base + len(rows)].numpy()
            assert np.abs(rows - same).max() < TOLERANCE and np.array_equal(rows.argmax(-1), same.argmax(-1))
            assert torch.equal(given[-1], positions[..., base : base + len(rows)])
    finally:
        hook.remove()
    assert len(given) > 10


def rows_of(engine: OmniEngine, *, at_once: bool, disturb: Any = lambda: None) -> bytes:
    """Rows of three sequences, the last one without audio, that take turns or come one after another."""
    prompts = [spoken(engine, 1, 2.7), spoken(engine, 2, 0.31), (list(engine.vocab.encode("今天天气")), ())]
    found: list[Any] = []
    for group in [prompts] if at_once else [[prompt] for prompt in prompts]:
        sequences, rows, last_ids = [], [list[Any]() for _ in group], [prompt[-1] for prompt, _ in group]
        for prompt in group:
            disturb()
            sequences.append(engine.open(*prompt))
        for _ in range(8):
            disturb()
            for own, sequence, last_id in zip(rows, sequences, last_ids, strict=True):
                own.append(sequence.extend([last_id]))
            last_ids = [int(row[-1][-1].argmax()) for row in rows]
        found += [row for own in rows for row in own]
    return b"".join(row.tobytes() for row in found)


def test_state_on_the_model_is_neither_read_nor_written(omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the state would add another delta to the positions of each forward."""
    deltas = iter(range(3, 1000))
    expected = rows_of(omni, at_once=False)
    assert omni._model.model.rope_deltas is None
    monkeypatch.setattr(omni._model.model, "rope_deltas", None)  # as it was, at the end
    disturb = lambda: setattr(omni._model.model, "rope_deltas", torch.tensor([[next(deltas)]]))  # noqa: E731
    assert rows_of(omni, at_once=True, disturb=disturb) == expected


@pytest.mark.parametrize("part", ["model.language_model.layers.1.mlp", "model.audio_tower"])
def test_a_failed_forward_changes_no_sequence(part: str, omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, media = spoken(omni, 1, 2.7)
    sequence, fresh = omni.open(prompt, media), omni.begin(prompt, media)
    expected = sequence.extend(prompt[-1:])
    sequence.truncate(len(prompt) - 1)
    with monkeypatch.context() as patched:
        patched.setattr(omni._model.get_submodule(part), "forward", lambda *_, **__: 1 / 0)
        if "layers" in part:
            with pytest.raises(EngineError, match="refused a forward of 1 rows: division by zero"):
                sequence.extend(prompt[-1:])
        with pytest.raises(EngineError, match="division by zero"):
            omni.prefill(fresh, prompt)
        assert (fresh.length, omni.kv_length(fresh)) == (0, 0)
    assert omni.kv_length(sequence) == len(prompt) - 1
    omni.fill(fresh, prompt)
    for each in (sequence, fresh):
        assert np.array_equal(each.extend(prompt[-1:]), expected)


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_bfloat16_on_a_gpu(omni_folder: Path) -> None:
    engine = OmniEngine(omni_folder, EngineOptions(context_len=256, device="cuda", dtype="bfloat16"))
    assert rows_of(engine, at_once=True) == rows_of(engine, at_once=False)
