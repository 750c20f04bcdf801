"""The thinker of Qwen2.5-Omni on random weights: one audio encoding, explicit positions, no state on the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.options import EngineOptions
from skydraft.engines.transformers_omni import OmniEngine
from skydraft.errors import EngineError
from skydraft.types import Cost, Media

from ..later import later
from .contract import largest_difference, one_by_one
from .tiny_checkpoint import NUM_PADDING_ROWS, OPTIONS
from .tiny_omni import AUDIO, clip, greedy, heard, spoken

torch = later("torch")
transformers = later("transformers")
later("tokenizers")

DURATIONS = [0.31, 1.3, 2.0, 4.05]  # seconds; the encoder works in windows of 2
# Largest difference between two ways to compute the same row in float32; logits here reach 12. Measured: 2e-5.
TOLERANCE = 1e-4


@pytest.fixture
def encodings(omni: OmniEngine) -> Iterator[list[int]]:
    """Grows by one entry per run of the audio encoder."""
    runs: list[int] = []
    hook = omni._model.model.audio_tower.register_forward_hook(lambda *_: runs.append(1))
    yield runs
    hook.remove()


def hf_greedy(thinker: Any, num_tokens: int, **given: Any) -> list[int]:
    size = thinker.config.text_config.vocab_size
    token_ids = thinker.generate(
        **given,
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=-1,
        pad_token_id=0,
        suppress_tokens=list(range(size - NUM_PADDING_ROWS, size)),
    )[0]
    return list(token_ids[given["input_ids"].shape[1] :].tolist())


# --- equality with transformers ---


def test_greedy_equals_generate_with_audio_and_without(omni: OmniEngine, thinker: Any) -> None:
    others = set()
    for seed in (1, 2):
        prompt, media = spoken(omni, seed, 2.7)
        tokens = greedy(omni.open(prompt, media), prompt[-1], 30)
        assert tokens == hf_greedy(thinker, 30, **heard(prompt, media))
        others.add(tuple(tokens))
    assert len(others) == 2, "the clip must matter, or nothing was tested"
    prompt = list(omni.vocab.encode("<|im_start|>今天天气很好"))
    ids = torch.tensor([prompt])
    expected = hf_greedy(thinker, 30, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert greedy(omni.open(prompt), prompt[-1], 30) == expected


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


# --- audio goes in once (F16) ---


def test_audio_is_encoded_once_per_sequence(omni: OmniEngine, encodings: list[int]) -> None:
    prompt, media = spoken(omni, 1, 2.7)
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


def test_a_long_prompt_goes_in_by_parts_with_one_encoding(
    omni: OmniEngine, encodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, media = spoken(omni, 2, 4.05)
    expected = omni.open(prompt, media).extend(prompt[-1:])
    monkeypatch.setattr(omni, "max_batch_rows", 16)
    sequence, lengths = omni.begin(prompt, media), []
    assert len(encodings) == 1 and sequence.prefill_cost == Cost()
    while omni.prefill(sequence, prompt):
        lengths.append(sequence.length)
    assert lengths == list(range(16, len(prompt) - 1, 16)) and len(encodings) == 2
    assert np.abs(sequence.extend(prompt[-1:]) - expected).max() < TOLERANCE


def test_a_sequence_tells_what_its_prompt_cost(omni: OmniEngine) -> None:
    prompt, media = spoken(omni, 1, 2.7)
    cost = omni.open(prompt, media).prefill_cost
    assert 0 < cost.encode_ms < cost.prefill_ms == cost.forward_ms < 10_000
    assert (cost.num_passes, cost.num_rows) == (0, 0)
    assert omni.open(prompt[:2]).prefill_cost.encode_ms == 0 < omni.open(prompt[:2]).prefill_cost.prefill_ms


# --- positions (F8) ---


def pieces(engine: OmniEngine, seed: int, duration_s: float) -> Iterator[tuple[list[int], Media, int, Any]]:
    """Feed a prompt with audio and 40 tokens piece by piece, with rollbacks, also into the prompt.

    Yields all token ids, the media, and per piece its base and logits [num_rows, vocab.size].
    """
    rng = np.random.default_rng(seed)
    prompt, media = spoken(engine, seed, duration_s)
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


@pytest.mark.parametrize(("seed", "duration_s"), list(enumerate(DURATIONS)))
def test_piece_by_piece_equals_one_forward_at_the_positions_of_get_rope_index(
    seed: int, duration_s: float, omni: OmniEngine, thinker: Any
) -> None:
    given: list[Any] = []
    hook = omni._model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    expected = None
    try:
        for tokens, media, base, rows in pieces(omni, seed, duration_s):
            if expected is None:
                with torch.inference_mode():
                    expected = thinker(**heard(tokens, media)).logits[0, :, : omni.vocab.size]
                positions, delta = thinker.get_rope_index(
                    torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                    audio_seqlens=torch.tensor([media[0].num_frames]),
                )  # fmt: skip
                assert delta.item() == 0
            same = expected[base : base + len(rows)].numpy()
            assert np.abs(rows - same).max() < TOLERANCE and np.array_equal(rows.argmax(-1), same.argmax(-1))
            assert torch.equal(given[-1], positions[..., base : base + len(rows)])
    finally:
        hook.remove()
    assert len(given) > 10


class PositionsFromZero(OmniEngine):
    """Each step counts its positions from 0, as if nothing came before."""

    def _position_ids(self, base: int, num_rows: int) -> Any:
        return super()._position_ids(0, num_rows)


class PositionsOfTheModel(OmniEngine):
    """Positions are moved by the state on the model."""

    def _position_ids(self, base: int, num_rows: int) -> Any:
        return super()._position_ids(base, num_rows) + self._model.model.rope_deltas


def test_wrong_positions_are_caught(omni_folder: Path, omni: OmniEngine) -> None:
    prompt, media = spoken(omni, 1, 1.3)
    expected = one_by_one(omni, prompt, media)
    assert largest_difference(omni, prompt, expected, media=media) < TOLERANCE
    broken = PositionsFromZero(omni_folder, OPTIONS)
    assert largest_difference(broken, prompt, expected, media=media) > 1000 * TOLERANCE


# --- sequences do not touch each other ---


def rows_of(engine: OmniEngine, *, at_once: bool, disturb: Any = lambda: None) -> list[list[Any]]:
    """Rows of three sequences, the last one without audio, that take turns or come one after another."""
    prompts = [spoken(engine, 1, 2.7), spoken(engine, 2, 0.31), (list(engine.vocab.encode("今天天气")), ())]
    found: list[list[Any]] = []
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
        found += rows
    return found


def bits(rows: list[list[Any]]) -> bytes:
    return b"".join(row.tobytes() for own in rows for row in own)


def test_state_on_the_model_is_neither_read_nor_written(omni_folder: Path, omni: OmniEngine) -> None:
    deltas = iter(range(3, 1000))

    def disturb(engine: OmniEngine) -> None:
        engine._model.model.rope_deltas = torch.tensor([[next(deltas)]])

    expected = bits(rows_of(omni, at_once=False))
    assert bits(rows_of(omni, at_once=True, disturb=lambda: disturb(omni))) == expected
    assert omni._model.model.rope_deltas is not None
    omni._model.model.rope_deltas = None
    rows_of(omni, at_once=True)
    assert omni._model.model.rope_deltas is None
    reader = OmniEngine(omni_folder, OPTIONS)
    reader.__class__ = PositionsOfTheModel
    disturb(reader)
    assert bits(rows_of(reader, at_once=True, disturb=lambda: disturb(reader))) != expected, (
        "such a reader must be caught"
    )


def test_a_failed_forward_leaves_the_sequence_as_it_was(omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, media = spoken(omni, 1, 2.7)
    sequence = omni.open(prompt, media)
    expected = sequence.extend(prompt[-1:])
    sequence.truncate(len(prompt) - 1)
    layer = omni._model.model.language_model.layers[1].mlp
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", lambda hidden: 1 / 0)
        with pytest.raises(EngineError, match="refused a forward of 1 rows: division by zero"):
            sequence.extend(prompt[-1:])
        fresh = omni.begin(prompt, media)
        with pytest.raises(EngineError, match="division by zero"):
            omni.prefill(fresh, prompt)
        assert (fresh.length, omni.kv_length(fresh)) == (0, 0)
    assert omni.kv_length(sequence) == len(prompt) - 1
    assert np.array_equal(sequence.extend(prompt[-1:]), expected)
    while omni.prefill(fresh, prompt):
        pass
    assert np.array_equal(fresh.extend(prompt[-1:]), expected)


def test_a_failed_encoding_is_tried_again(omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, media = spoken(omni, 1, 0.31)
    sequence = omni.begin(prompt, media)
    with monkeypatch.context() as patched:
        patched.setattr(omni._model.model.audio_tower, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(EngineError, match="division by zero"):
            omni.prefill(sequence, prompt)
    omni.prefill(sequence, prompt)
    assert np.array_equal(sequence.extend(prompt[-1:]), omni.open(prompt, media).extend(prompt[-1:]))


# --- precision and devices ---


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_bfloat16_on_a_gpu(omni_folder: Path) -> None:
    engine = OmniEngine(omni_folder, EngineOptions(context_len=256, device="cuda", dtype="bfloat16"))
    expected = bits(rows_of(engine, at_once=False))
    assert bits(rows_of(engine, at_once=True)) == expected
    prompt, media = spoken(engine, 1, 2.7)
    sequence = engine.open(prompt, media)
    assert sequence.prefill_cost.encode_ms > 0 and len(sequence.extend(prompt[-1:])) == 1
