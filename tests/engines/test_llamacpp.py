"""The engine of GGUF files on a tiny model: its vocabulary, its limits, and sequences whose memory grows with them."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import skydraft
from skydraft.engines.adapter import write_adapter
from skydraft.engines.llama.library import load_library
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.errors import EngineError, OptionError
from skydraft.types import Reuse

from ..later import later
from ..serving import serving
from .adapters import change
from .contract import TOLERANCE
from .tiny_checkpoint import to_gguf

IDS = [3 + (7 * number) % 200 for number in range(700)]


def test_what_a_longer_one_shares_is_copied_into_a_shorter_place_and_one_left_open_is_closed(tiny_gguf: Path) -> None:
    with open_engine("grows", tiny_gguf, EngineOptions(1024, 3, total_len=4096, num_threads=1)) as engine:
        prompt, talk = [*IDS[:300], 5, 6], Reuse("talk", exact=True)
        with closing(engine.open(prompt)) as alone, closing(engine.open(IDS, reuse=talk)):
            with closing(engine.open(prompt, reuse=talk)) as copied:
                assert copied.prefill_cost.num_cached == 256 and copied.slot.length == 512
                assert np.array_equal(copied.extend([6]), alone.extend([6]))
            assert engine.num_cells == 512 + 1024 + 512  # it is kept
        engine.forget_kept()
        engine.allocate(300)  # a place that an interrupt left: the next closes it
        with closing(engine.open(IDS[:100])):
            assert engine.num_cells == 256


def test_adapters_share_the_places_and_the_memory_of_their_model(tiny_gguf: Path, tmp_path: Path) -> None:
    options = EngineOptions(1024, 3, total_len=1400, num_threads=1)
    with open_engine("grows", tiny_gguf, options) as engine:
        write_adapter(tmp_path / "one.gguf", change(engine.fingerprint, {"blk.1.attn_q.weight": (32, 32)}))
        with engine.open_adapted(tmp_path / "one.gguf") as adapted:
            talk = Reuse("talk", exact=True)
            engine.open(IDS[:300], reuse=talk).close()
            assert engine.num_cells == 512
            with closing(adapted.open(IDS[:600])):
                assert adapted.num_cells == 1024
                with closing(engine.open(IDS[:100])) as short:
                    assert engine.num_cells == 256  # there is no room any more for what was kept
                    engine.fill(short, IDS[:400])
                    assert engine.num_cells == 512  # the place that it has left is gone


def test_a_row_of_each_of_many_sequences_fits_into_one_forward(tiny_gguf: Path) -> None:
    with open_engine("many", tiny_gguf, EngineOptions(context_len=32, max_sequences=20, num_threads=1)) as engine:
        feeds = [(engine.open([token_id]), [token_id]) for token_id in range(3, 23)]
        together = [rows.copy() for rows in engine.extend_batch(feeds)]
        for (sequence, token_ids), rows in zip(feeds, together, strict=True):
            sequence.truncate(0)
            assert np.abs(rows - sequence.extend(token_ids)).max() < TOLERANCE


def test_layers_on_a_gpu_are_refused_where_the_library_has_none(tiny_gguf: Path) -> None:
    if load_library().supports_gpu_offload():
        pytest.skip("this llama.cpp has a GPU")
    with pytest.raises(OptionError, match="gpu_layers -1 needs a llama"):
        open_engine("tiny", tiny_gguf, EngineOptions(context_len=32, gpu_layers=-1))


def test_a_device_without_a_model_gets_the_vocabulary_of_a_server(tiny_gguf: Path) -> None:
    with skydraft.load(tiny_gguf, context=64) as target, serving(target) as server:
        with closing(skydraft.connect(server.address)) as cloud:
            edge = skydraft.without_model(cloud)
        assert not edge.drafts and edge.vocab.fingerprint == target.vocab.fingerprint
        assert edge.vocab.chat_template == target.vocab.chat_template and edge.vocab.end_ids == target.vocab.end_ids
        with pytest.raises(EngineError, match="no draft model"):
            edge.open([1, 2, 3]).extend([3])


def test_a_file_may_have_another_template_for_requests_with_tools(folder: Path, tmp_path: Path) -> None:
    later("llama_cpp")
    later("gguf")
    chat, tools = ({"name": name, "template": text} for name, text in (("default", "chat"), ("tool_use", "tools")))
    for templates, read in (((chat, tools), ("chat", "tools")), ((tools,), ("tools", "tools"))):
        path = to_gguf(folder, tmp_path / "model.gguf", *templates)
        with open_engine("tools", path, EngineOptions(64, num_threads=1)) as engine:
            assert (engine.vocab.chat_template, engine.vocab.tool_template) == read
