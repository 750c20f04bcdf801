"""Speech is learned from like text: the halves hear what the engine hears."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from skydraft.engines.options import EngineOptions
from skydraft.engines.trainable import load_trainable
from skydraft.learning.halves import Halves
from skydraft.learning.lessons import Lesson, StoredMedia, decode, encode
from skydraft.models import embedded_path

from ..later import later

later("torch")


def test_the_halves_of_a_model_that_hears_are_the_engine(one_thread: None) -> None:
    from skydraft.engines.transformers_omni import OmniEngine

    path = embedded_path("tiny-omni-edge")
    engine = OmniEngine(path, EngineOptions(context_len=640, num_threads=1), name="edge")
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    media = engine.media(samples).rounded()
    prompt = (*engine.audio_tokens(media), *engine.vocab.encode("请描述。"))
    token_ids = engine.vocab.encode("这段录音里")
    lesson = Lesson(
        draft="d", target="t", vocab="v", prompt_ids=prompt, media=(StoredMedia.of(media),), token_ids=token_ids,
        marks="t" * len(token_ids),
    )  # fmt: skip
    lesson = decode(encode(lesson))
    sequence = engine.open(prompt, (media,))
    rows = sequence.extend([prompt[-1], *token_ids[:-1]])
    sequence.close()
    trainable = load_trainable(Path(path))
    for num_upper in (1, 2):
        halves = Halves(trainable, num_upper, engine.vocab.size)
        found = trainable.head(halves.rows(halves.activations(lesson)))[:, : engine.vocab.size]
        assert np.allclose(found.detach().numpy(), np.asarray(rows), atol=1e-3)
