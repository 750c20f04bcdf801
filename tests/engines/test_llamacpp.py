"""The engine of GGUF files on the demo pair's draft model, where it is on this machine."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import skydraft
from skydraft.engines.llama.library import load_library
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.errors import EngineError, OptionError

from ..serving import serving

pytestmark = [pytest.mark.model, pytest.mark.long]


def test_rows_stay_exact_past_the_lengths_that_were_probed(gguf_path: Path) -> None:
    """Forwards of n rows at 300 and 600 tokens against one row at a time on a second sequence, and then once more."""
    options = EngineOptions(context_len=1024, max_sequences=2, num_threads=2)
    with open_engine("draft", gguf_path, options) as engine:
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


def test_a_row_of_each_of_many_sequences_fits_into_one_forward(gguf_path: Path) -> None:
    options = EngineOptions(context_len=32, max_sequences=20, num_threads=2)
    with open_engine("draft", gguf_path, options) as engine:
        sequences = [engine.open([1000 + index]) for index in range(20)]
        alone = [engine.extend_batch([(sequence, [1000 + i])])[0].copy() for i, sequence in enumerate(sequences)]
        for sequence in sequences:
            sequence.truncate(0)
        together = engine.extend_batch([(sequence, [1000 + i]) for i, sequence in enumerate(sequences)])
        for one, other in zip(alone, together, strict=True):
            assert np.abs(one - other).max() < 0.05 * np.abs(one).max()


def test_layers_on_a_gpu_are_refused_where_the_library_has_none(gguf_path: Path) -> None:
    if load_library().supports_gpu_offload():
        pytest.skip("this llama.cpp has a GPU")
    with pytest.raises(OptionError, match="gpu_layers -1 needs a llama"):
        open_engine("draft", gguf_path, EngineOptions(context_len=32, gpu_layers=-1))


def test_a_device_without_a_model_gets_the_vocabulary_of_a_server(tiny_gguf: Path) -> None:
    with skydraft.load(tiny_gguf, context=64) as target, serving(target) as server:
        with closing(skydraft.connect(server.address)) as cloud:
            edge = skydraft.without_model(cloud)
        assert not edge.drafts and edge.vocab.fingerprint == target.vocab.fingerprint
        assert edge.vocab.chat_template == target.vocab.chat_template and edge.vocab.end_ids == target.vocab.end_ids
        with pytest.raises(EngineError, match="no draft model"):
            edge.open([1, 2, 3]).extend([3])
