"""The engine of GGUF files on the demo pair's draft model, where it is on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.llamacpp import LlamaCppEngine
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.errors import EngineError
from skydraft.models import cache_dir, default_pair, known_models
from skydraft.models.cache import model_path

pytestmark = [pytest.mark.model, pytest.mark.long]
pytest.importorskip("llama_cpp")


@pytest.fixture(scope="module")
def path() -> Path:
    found = model_path(known_models()[default_pair().draft], cache_dir())
    if not found.is_file():
        pytest.skip(f"no model: {found} is missing")
    return found


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LlamaCppEngine]:
    with open_engine("gguf", "draft", path, EngineOptions(context_len=64, max_sequences=2, num_threads=1)) as engine:
        assert isinstance(engine, LlamaCppEngine)
        yield engine


def test_a_closed_engine_refuses_everything(path: Path) -> None:
    """llama.cpp would be given the null pointer, or a model that is no longer there."""
    engine = LlamaCppEngine(path, EngineOptions(context_len=16, max_sequences=2, num_threads=1), name="draft")
    vocab = engine.vocab
    prompt = vocab.encode("今天天气很好")
    sequence, begun = engine.open(prompt), engine.begin(prompt)
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: engine.open(prompt),
        lambda: engine.prefill(begun, prompt),
        lambda: sequence.extend(prompt[-1:]),
        lambda: sequence.truncate(1),
        lambda: vocab.encode("今天"),
    ]
    for use in uses:
        with pytest.raises(EngineError, match=r"^draft is closed\.$"):
            use()
    assert vocab.decode(prompt) == "今天天气很好"
    for close in (sequence.close, begun.close, engine.close, engine.close):
        close()


def test_a_seat_given_up_in_another_thread_is_free_again(engine: LlamaCppEngine) -> None:
    prompt = engine.vocab.encode("今天天气很好")
    for _ in range(3):
        sequences = [engine.open(prompt) for _ in range(2)]
        with pytest.raises(EngineError, match="are in use"):
            engine.open(prompt)
        for sequence in sequences:
            with engine.floor:
                closing = threading.Thread(target=sequence.close)
                closing.start()
                closing.join()


def test_rows_stay_exact_past_the_lengths_that_were_probed(path: Path) -> None:
    """Forwards of n rows at 300 and 600 tokens against one row at a time on a second sequence, and then once more."""
    with open_engine("gguf", "draft", path, EngineOptions(context_len=1024, max_sequences=2, num_threads=2)) as engine:
        assert engine.invariant_rows >= 1
        ids = [token_id + 1000 for token_id in range(700)]
        wide, single = engine.open(ids[:301]), engine.open(ids[:301])
        for length in (300, 320, 600, 620):
            for sequence in (wide, single):
                while sequence.length < length:
                    engine.forward([(sequence, ids[sequence.length :][:20])], want_logits=False)
                    sequence.record(ids[sequence.length :][:20])
            for num_rows in range(2, engine.invariant_rows + 1):
                feed = ids[length:][:num_rows]
                together = engine.extend_batch([(wide, feed)])[0].copy()
                singly = np.concatenate([single.extend([token_id]).copy() for token_id in feed])
                assert np.array_equal(together, singly), (length, num_rows)
                wide.truncate(length)
                single.truncate(length)
