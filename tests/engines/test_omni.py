"""The thinker of Qwen2.5-Omni on random weights: one audio encoding, explicit positions, no state on the model."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.options import EngineOptions
from skydraft.errors import EngineError, PromptError
from skydraft.types import Media, Recordings, Reuse

from ..later import later
from .contract import TOLERANCE, check_rollback, largest_difference, rows_after
from .tiny_checkpoint import AUDIO, clip, heard, spoken, spoken_often

torch = later("torch")
transformers = later("transformers")

TURNS = (1, 0.31), (2, 2.7), (3, 1.3)
# Recordings of a prompt: (seed, seconds); the encoder works in windows of 2.
RECORDINGS = [*([each] for each in enumerate([0.31, 1.3, 2.0, 4.05])), TURNS, TURNS[::-1], []]


@pytest.mark.parametrize("num_samples", [1600, 16_001, 64_159])
def test_features_are_those_of_the_processor_without_its_padding(num_samples: int, omni: OmniEngine) -> None:
    samples = clip(3, 5.0)[:num_samples]
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    padded = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    num_frames = int(padded["attention_mask"].sum())
    media = omni.media(samples)
    assert media.num_frames == num_frames
    assert np.abs(media.features - padded["input_features"][0, :, :num_frames]).max() < 1e-5


def test_samples_that_make_no_media(omni: OmniEngine) -> None:
    for samples, message in ((np.zeros(0), "too few"), (np.full(320, 0.1), "2 frames of audio are too few"),
                             (np.full(16_000, np.nan), "must be finite")):  # fmt: skip
        with pytest.raises(PromptError, match=message):
            omni.media(samples.astype(np.float32))


def test_f16_audio_is_encoded_once(omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Mock(wraps=omni._model.get_audio_features)
    monkeypatch.setattr(omni._model, "get_audio_features", encode)
    monkeypatch.setattr(omni, "max_batch_rows", 16)  # the prompt goes in by parts
    prompt, media = spoken(omni, 1, 2.7)
    sequence = omni.open(prompt, media)
    rows = rows_after(sequence, prompt[-1], 5)
    for length in (len(prompt) - 1, 20, 2, 0):
        sequence.truncate(length)
        omni.fill(sequence, prompt)
        assert np.abs(np.subtract(rows_after(sequence, prompt[-1], 5), rows)).max() < TOLERANCE
    assert encode.call_count == 1
    omni.open(prompt, media)
    omni.open([token_id for token_id in prompt if token_id != omni.vocab.encode(AUDIO)[0]])
    assert encode.call_count == 2


@pytest.mark.parametrize("clips", RECORDINGS)
def test_f8_pieces_equal_one_forward_at_positions_of_get_rope_index(clips: Any, omni: OmniEngine, thinker: Any) -> None:
    """Whatever was fed and taken back, also where the model has kept the state of another text."""
    prompt, media = spoken_often(omni, *clips)
    plain = np.random.default_rng(len(clips)).integers(10, omni.vocab.size, 40).tolist()
    text = [*(prompt or omni.vocab.encode("<|im_start|>今天天气很好")), *plain]
    with torch.inference_mode():
        expected = thinker(**heard(text, media)).logits[0, :, : omni.vocab.size].numpy()
    omni._model.model.rope_deltas = torch.tensor([[7]])
    assert largest_difference(omni, text, expected, media=media, max_rows=50) < TOLERANCE
    assert omni._model.model.rope_deltas.item() == 7
    omni._model.model.rope_deltas = None


@pytest.mark.parametrize("part", ["model.language_model.layers.1.mlp", "model.audio_tower"])
def test_a_failed_forward_changes_no_sequence(part: str, omni: OmniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before the one that fails have written into the cache."""
    prompt, media = spoken(omni, 1, 2.7)
    sequence, fresh = omni.open(prompt, media), omni.begin(prompt, media)
    with monkeypatch.context() as patched:
        patched.setattr(omni._model.get_submodule(part), "forward", lambda *_, **__: 1 / 0)
        if "layers" in part:
            with pytest.raises(EngineError, match="refused a forward of 1 rows: division by zero"):
                sequence.extend(prompt[-1:])
        with pytest.raises(EngineError, match="division by zero"):
            omni.prefill(fresh, prompt)
        assert [omni.kv_length(each) for each in (sequence, fresh)] == [len(prompt) - 1, 0]
    omni.fill(fresh, prompt)
    assert np.array_equal(*(each.extend(prompt[-1:]) for each in (sequence, fresh)))


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_bfloat16_on_a_gpu(omni_folder: Path) -> None:
    engine = OmniEngine(omni_folder, EngineOptions(context_len=256, device="cuda", dtype="bfloat16"))
    check_rollback(engine, *spoken(engine, 1, 2.7))


def test_later_turns_take_up_what_was_heard_and_equal_fresh_engines(omni_folder: Any) -> None:
    """Conversations that grow, go back, change a recording, or begin like another: the cache changes no bit.

    An audio token that is generated where a kept sequence had a recording is a token like any other.
    """
    options = EngineOptions(max_sequences=3, context_len=1024)
    cached, fresh = OmniEngine(omni_folder, options), OmniEngine(omni_folder, options)
    cached.max_batch_rows = fresh.max_batch_rows = 16
    rng, num_cached, audio_id = np.random.default_rng(0), 0, cached.vocab.encode(AUDIO)[0]
    said: list[tuple[int, float]] = []
    for _ in range(16):
        said = said[: rng.integers(0, len(said) + 1)]
        said += [(int(rng.integers(1, 4)), 1.3) for _ in range(rng.integers(1, 3))]
        prompt, media = spoken_often(cached, *said)
        sequence, alone = cached.open(prompt, media, Reuse("a")), fresh.open(prompt, media)
        num_cached += sequence.take_prefill_cost().num_cached
        for ids in [prompt[-1:], *rng.choice([audio_id, 30, 31], (3, 5)).tolist()]:
            assert np.array_equal(sequence.extend(ids), alone.extend(ids))
        sequence.close()
        alone.close()
    assert num_cached > 300


def test_an_audio_token_after_the_prompt_is_a_token_like_any_other(omni: OmniEngine, thinker: Any) -> None:
    prompt, media = spoken(omni, 1, 0.31)
    audio_id = omni.vocab.encode(AUDIO)[0]
    rows = omni.open(prompt, media).extend([prompt[-1], audio_id, 30])
    embeddings = thinker.get_input_embeddings()(torch.tensor([[*prompt, audio_id, 30]]))
    at = prompt.index(audio_id)
    with torch.inference_mode():
        audio = thinker.get_audio_features(**{k: v for k, v in heard(prompt, media).items() if "feature" in k})
        embeddings[0, at : at + media[0].num_tokens] = audio.last_hidden_state
        expected = thinker(inputs_embeds=embeddings).logits[0, -3:, : omni.vocab.size]
    assert np.abs(rows - expected.numpy()).max() < TOLERANCE


def test_prompts_that_do_not_fit_their_audio(omni: OmniEngine) -> None:
    prompt, media = spoken(omni, 1, 1.3)
    audio_id = omni.vocab.encode(AUDIO)[0]
    at = prompt.index(audio_id)
    end = at + media[0].num_tokens
    wrong: list[tuple[list[int], Recordings]] = [
        (prompt, ()), (prompt[: at + 1] + prompt[at + 2 :], media), ([*prompt, audio_id, 30], media),
        ([*prompt[: at + 1], 30, *prompt[at + 1 :]], media), (prompt[:end], media), (prompt, media * 2),
        (prompt, (Media(np.zeros((80, media[0].num_frames), np.float32)),)),
        (prompt * 2, (media[0], omni.media(clip(1, 2.0)))),
    ]  # fmt: skip
    for token_ids, given in wrong:
        with pytest.raises(PromptError, match="audio tokens do not match its"):
            omni.open(token_ids, given)
