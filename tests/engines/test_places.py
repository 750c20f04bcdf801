"""Sequences of llama.cpp whose memory grows with them, on a tiny model."""

from contextlib import closing
from pathlib import Path

import numpy as np

from skydraft.engines.adapter import write_adapter
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.types import Reuse

from .adapters import change

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
            assert adapted.slots is engine.slots and adapted.num_cells == 0
            assert adapted.profile is engine.profile  # nothing is measured in a request
            talk = Reuse("talk", exact=True)
            engine.open(IDS[:300], reuse=talk).close()
            assert engine.num_cells == 512
            with closing(adapted.open(IDS[:600])):
                assert adapted.num_cells == 1024
                with closing(engine.open(IDS[:100])) as short:
                    assert engine.num_cells == 256  # there is no room any more for what was kept
                    engine.fill(short, IDS[:400])
                    assert engine.num_cells == 512  # the place that it has left is gone
