"""Several sequences in one forward of transformers: the rows of one after another, and one pass over the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.base import Sequence
from skydraft.engines.transformers_text import TransformersEngine
from skydraft.errors import EngineError
from tests.engines.test_omni import spoken
from tests.engines.tiny_checkpoint import OPTIONS, save_model
from tests.toys import law

from ..later import later

torch = later("torch")
CLOSE = 1e-4  # float32; a row of another text differs by more than 1
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 6},
    "Gemma2Config": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},  # eager, with a soft cap
}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TransformersEngine]:
    folder = save_model(tmp_path_factory.mktemp("model"), request.param, seed=3, **MODELS[request.param])
    with TransformersEngine(folder, OPTIONS, name=request.param) as engine:
        yield engine


def passes(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass over the weights from now on."""
    seen: list[int] = []
    head, plain = engine._model.lm_head, engine._model.lm_head.forward

    def noted(hidden: Any) -> Any:
        seen.append(hidden.shape[-2])
        return plain(hidden)

    monkeypatch.setattr(head, "forward", noted)
    return seen


def in_turn(engine: TransformersEngine, sequences: list[Sequence], feeds: list[list[int]]) -> list[Any]:
    return [sequence.extend(feed) for sequence, feed in zip(sequences, feeds, strict=True)]


@law(8)
@given(st.data())
def test_rows_are_those_of_one_after_another(engine: TransformersEngine, data: st.DataObject) -> None:
    """Prompts, feeds and rollbacks at random; what is in the caches afterwards counts too."""
    ids = st.integers(0, engine.vocab.size - 1)
    prompts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=20), min_size=2, max_size=4))
    mine, theirs = ([engine.open(prompt) for prompt in prompts] for _ in range(2))
    for _ in range(data.draw(st.integers(1, 3))):
        feeds = [data.draw(st.lists(ids, min_size=1, max_size=4)) for _ in prompts]
        together = engine.extend_batch(list(zip(mine, feeds, strict=True)))
        for alone, rows in zip(in_turn(engine, theirs, feeds), together, strict=True):
            assert rows.shape == alone.shape and np.allclose(rows, alone, atol=CLOSE)
        for one, other in zip(mine, theirs, strict=True):
            length = data.draw(st.integers(0, one.length))
            one.truncate(length)
            other.truncate(length)
            assert engine.kv_length(one) == engine.kv_length(other) == length
    for sequence in (*mine, *theirs):
        sequence.close()


def test_one_pass_over_the_weights(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [engine.open([3, 4, 5]), engine.open([9, 8, 7, 6]), engine.open([1, 2])]
    engine.extend_batch([(sequence, [2]) for sequence in sequences])  # it is tried now
    seen = passes(engine, monkeypatch)
    rows = engine.extend_batch([(sequences[0], [2, 3]), (sequences[1], [4]), (sequences[2], [5, 6, 7])])
    assert seen == [6] and [len(each) for each in rows] == [2, 1, 3]
    assert engine._decoder_config._attn_implementation in ("sdpa", "eager")  # as it was


def test_as_many_rows_as_change_no_bit(target: TransformersEngine) -> None:
    if target.invariant_rows < 2:
        pytest.skip("no two rows at once have the bits of one here")
    prompts = [[3, 4, 5], [9, 8, 7, 6]]
    together = target.extend_batch([(target.open(prompt), prompt[-1:]) for prompt in prompts])
    for prompt, rows in zip(prompts, together, strict=True):
        assert np.array_equal(target.open(prompt).extend(prompt[-1:]), rows)


def test_a_model_that_cannot_is_fed_in_turn(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose attention does not ask for its implementation would attend to the rows of others."""
    with TransformersEngine(folders[0], OPTIONS, name="stubborn") as engine:
        module = __import__(type(engine._model).__module__, fromlist=["ALL_ATTENTION_FUNCTIONS"])
        functions = module.ALL_ATTENTION_FUNCTIONS
        monkeypatch.setattr(
            module, "ALL_ATTENTION_FUNCTIONS",
            type("Fixed", (), {"get_interface": staticmethod(lambda *_: functions["sdpa"])})(),
        )  # fmt: skip
        sequences, others = ([engine.open(prompt) for prompt in ([3, 4, 5], [9, 8])] for _ in range(2))
        seen = passes(engine, monkeypatch)
        together = engine.extend_batch([(sequence, [2, 3]) for sequence in sequences])
        assert seen[-2:] == [2, 2]
        for alone, rows in zip(in_turn(engine, others, [[2, 3]] * 2), together, strict=True):
            assert np.array_equal(rows, alone)


def test_a_failure_leaves_attention_and_caches(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [engine.open([3, 4, 5]), engine.open([9, 8])]
    before = [sequence.length for sequence in sequences]
    engine.extend_batch([(sequence, [2]) for sequence in sequences])
    for sequence, length in zip(sequences, before, strict=True):
        sequence.truncate(length)
    with monkeypatch.context() as patched:

        def full(hidden: Any) -> Any:
            raise RuntimeError("out of memory\nmore lines")

        patched.setattr(engine._model.model.layers[1].mlp, "forward", full)
        with pytest.raises(EngineError, match=r"refused a forward of 2 rows: out of memory$"):
            engine.extend_batch([(sequence, [2]) for sequence in sequences])
    assert [engine.kv_length(sequence) for sequence in sequences] == before
    alone = [engine.open([3, 4, 5]), engine.open([9, 8])]
    together = engine.extend_batch([(sequence, [2]) for sequence in sequences])
    for expected, rows in zip(in_turn(engine, alone, [[2], [2]]), together, strict=True):
        assert np.allclose(rows, expected, atol=CLOSE)


def test_speech_and_text_in_one_forward(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [spoken(omni, 1, 2.7), spoken(omni, 2, 0.31), (list(omni.vocab.encode("今天天气")), ())]
    mine, theirs = ([omni.open(*prompt) for prompt in prompts] for _ in range(2))
    omni.extend_batch([(mine[0], [2]), (mine[1], [2])])
    for sequence in mine[:2]:
        sequence.truncate(sequence.length - 1)
    seen = passes(omni, monkeypatch)
    feeds = [[prompt[0][-1], 5] for prompt in prompts]
    together = omni.extend_batch(list(zip(mine, feeds, strict=True)))
    assert seen == [6]
    for alone, rows in zip(in_turn(omni, theirs, feeds), together, strict=True):
        assert np.allclose(rows, alone, atol=CLOSE)
        assert np.array_equal(rows.argmax(-1), alone.argmax(-1))
