"""Prompts that fit their audio, prompts that do not, and models without ears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skydraft.engines.toy import open_toy
from skydraft.engines.transformers_omni import OmniEngine
from skydraft.engines.transformers_text import TransformersEngine
from skydraft.errors import PromptError
from skydraft.types import Media, Recordings

from .tiny_omni import AUDIO, clip, heard, spoken

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

TOLERANCE = 1e-4


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
    assert (rows - expected).abs().max() < TOLERANCE


def test_prompts_that_do_not_fit_their_audio(omni: OmniEngine) -> None:
    prompt, media = spoken(omni, 1, 1.3)
    audio_id = omni.vocab.encode(AUDIO)[0]
    at = prompt.index(audio_id)
    end = at + media[0].num_tokens
    wrong: list[tuple[list[int], Recordings, str]] = [
        (prompt, (), "has audio tokens but no audio"),
        (prompt[: at + 1] + prompt[at + 2 :], media, "runs of audio tokens are 31 long, its audio fills 32"),
        ([*prompt, audio_id, 30], media, "are 32, 1 long"),
        ([*prompt[: at + 1], 30, *prompt[at + 1 :]], media, "are 1, 31 long"),
        ([30, 31], media, "are none long"),
        (prompt[:end], media, "ends in its audio"),
        (prompt, (Media(np.zeros((80, media[0].num_frames), np.float32)),), "takes features of 128 mels, not 80"),
        (prompt, (omni.media(clip(1, 2.0)),), "its audio fills 50"),
        (prompt, media * 2, "its audio fills 32, 32"),
        (prompt * 2, media, "are 32, 32 long"),
        (prompt * 2, (media[0], omni.media(clip(1, 2.0))), "its audio fills 32, 50"),
    ]
    for token_ids, given, message in wrong:
        with pytest.raises(PromptError, match=message) as caught:
            omni.open(token_ids, given)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0, np.float32), "too few"),
        (np.full(320, 0.1, np.float32), "2 frames of audio are too few"),
        (np.full(16_000, np.nan, np.float32), "must be finite"),
    ],
)
def test_samples_that_make_no_media(samples: Any, message: str, omni: OmniEngine) -> None:
    with pytest.raises(PromptError, match=message):
        omni.media(samples)


def test_a_model_without_ears_says_so(target: TransformersEngine) -> None:
    media = Media(np.zeros((128, 9), np.float32))
    for engine in (target, open_toy("toy")):
        prompt = list(engine.vocab.encode("今天"))
        for ask in (engine.begin, engine.open, engine.check_prompt):
            with pytest.raises(PromptError, match=f"^The model {engine.name} takes no audio. Use a Qwen2.5-Omni model"):
                ask(prompt, (media,))
        with pytest.raises(PromptError, match="takes no audio"):
            engine.media(clip(1, 0.31))
        with pytest.raises(PromptError, match="takes no audio"):
            engine.audio_tokens(media)
