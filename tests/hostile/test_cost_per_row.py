"""What a stop rule costs for one row does not blow up with the text before it, whatever that is."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping, num_sentences
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Vocab
from tests.toys import law

PIECES = ["." * 64, "a.b" * 20, "x" * 64, "。", "我们", ". ", "a", "<eos>"]
VOCAB = Vocab([text.encode() for text in PIECES], lambda text: [0], special_ids=[7], end_ids=[7])
HOSTILE = {
    "dots": [0], "letters and dots": [1], "letters": [2], "stops": [3], "words": [6, 5], "all": [0, 1, 2, 3, 4, 5, 6],
}  # fmt: skip


def quickest(ask: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the quickest of a few tries: the machine may be busy."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_row_after_16000_hostile_tokens_does_not_take_for_ever(case: str) -> None:
    params = DecodingParams(sentences=10**6, min_new_tokens=10**6, max_new_tokens=10**6)
    generated = np.resize(np.array([*HOSTILE[case], 3], np.int32), 16_001)
    generated[-1] = 3  # ends a sentence, so that all are counted
    chooser, stopping = Chooser(params, VOCAB, 0), Stopping(params, VOCAB, 10**6)
    row = np.zeros(VOCAB.size, np.float32)
    assert quickest(lambda: chooser.choose(row, generated), 2) < 20  # a million stops; by the square it would be hours
    longer = DecodingParams(sentences=10**6, max_new_tokens=10**6)
    stopping = Stopping(longer, VOCAB, 10**6)
    assert quickest(lambda: stopping.finish(generated), 2) < 20
    short = generated[-4_000:]
    ratio = quickest(lambda: stopping.finish(generated)) / quickest(lambda: stopping.finish(short))
    assert ratio < 12  # 16k against 4k tokens; by the square it would be 16 and more


@law(300)
@given(st.text(alphabet="a.e g。！1 U", max_size=30), st.integers(1, 6))
def test_counting_may_stop_at_enough(text: str, enough: int) -> None:
    assert num_sentences(text, enough=enough) == min(num_sentences(text), enough)
