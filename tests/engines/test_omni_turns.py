"""Prompts with recordings: one in each turn of a conversation, some that do not fit, and models without ears."""

from typing import Any

import numpy as np
import pytest

from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.options import EngineOptions
from skydraft.errors import PromptError
from skydraft.types import Media, Recordings, Reuse

from ..later import later
from .contract import TOLERANCE
from .tiny_omni import AUDIO, clip, heard, spoken, spoken_often

torch = later("torch")
later("transformers")


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
        sequence = cached.open(prompt, media, Reuse("a"))
        num_cached += sequence.take_prefill_cost().num_cached
        rows = [sequence.extend(prompt[-1:])]
        rows += [sequence.extend(ids) for ids in rng.choice([audio_id, 30, 31], (3, 5)).tolist()]
        alone = fresh.open(prompt, media)
        fed = sequence.token_ids[len(prompt) - 1 :].tolist()
        expected = [alone.extend(fed[:1])] + [alone.extend(fed[at : at + 5]) for at in (1, 6, 11)]
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(rows, expected, strict=True))
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
