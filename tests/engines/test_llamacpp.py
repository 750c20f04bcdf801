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
