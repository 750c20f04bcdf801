"""The engine of GGUF files. On a tiny model: its vocabulary, its limits, and sequences whose memory grows with them.
On the demo's draft model in Q4_0, made on the spot: padded rows, several sequences and copies change no bit."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

import skydraft
from skydraft import api
from skydraft.cli.main import main
from skydraft.engines.adapter import write_adapter
from skydraft.engines.llama.engine import LlamaCppEngine
from skydraft.engines.llama.library import load_library
from skydraft.engines.llama.weights import quantize
from skydraft.engines.options import EngineOptions
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.engines.registry import open_engine
from skydraft.errors import EngineError, OptionError
from skydraft.types import Reuse

from ..later import later
from ..serving import serving
from .adapters import change
from .contract import TOLERANCE
from .tiny_checkpoint import to_gguf

IDS = [3 + (7 * number) % 200 for number in range(700)]
LATER = [("q4_0", 1, 0), ("q4_0", 1, 9000), ("gguf_path", 2, 0)]


@pytest.fixture(scope="module")
def q4_0(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "models" / "draft-q4_0.gguf"
    quantize(gguf_path, made, "q4_0")
    return made


@pytest.fixture(
    scope="module", params=[("q4_0", 2, 0), *(pytest.param(each, marks=pytest.mark.long) for each in LATER)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaCppEngine]:
    """Of the file in Q4_0, and of the one as it is published."""
    file, num_threads, total_len = request.param
    options = EngineOptions(num_threads=num_threads, max_sequences=4, context_len=1200, total_len=total_len)
    with LlamaCppEngine(request.getfixturevalue(file), options) as engine:
        yield engine


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


@pytest.mark.parametrize("length", [40, 300, pytest.param(900, marks=pytest.mark.long)])
def test_rows_keep_their_bits_as_the_probe_says(
    engine: LlamaCppEngine, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "probed_len", 10**9)  # none is compared
    monkeypatch.setattr(engine, "prefixes", PrefixCache())
    pick, ids = random.Random(length), np.random.default_rng(1).integers(100, 50000, length + 4).tolist()
    engine.prefixes.beginning = tuple(ids[:length])  # read once, and copied
    with ExitStack() as stack:
        sequences = [stack.enter_context(closing(engine.open([*ids[:length], last, 7]))) for last in ids[length:]]
        for _ in range(4):
            left, feeds = engine.invariant_rows, []
            for sequence in pick.sample(sequences, pick.randrange(1, 5)):
                if num_rows := min(left, pick.choice([1, 1, 2, 3, 5, 16])):
                    feeds.append((sequence, pick.sample(range(100, 50000), num_rows)))
                    left -= num_rows
            together = [rows.copy() for rows in engine.extend_batch(feeds)]
            for (sequence, token_ids), rows in zip(feeds, together, strict=True):
                assert sequence.length == length + 1 + len(token_ids)
                sequence.truncate(length + 1)
                assert np.array_equal(rows, np.concatenate([sequence.extend([each]).copy() for each in token_ids]))
                sequence.truncate(length + 1)


def test_it_is_quantized_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A model is quantized once, under its own name, and a target only by force."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tiny_gguf.parent))
    made = tmp_path / "models" / "tiny-q8_0.gguf"

    def run(model: str, kind: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["models", "quantize", model, "--type", kind])
        out, err = capsys.readouterr()
        assert bool(ended.value.code) == bool(err)
        return out + err

    with FileLock(made.with_name("tiny-q8_0.gguf.lock")):
        assert "tiny-q8_0 is being made by another process" in run(str(tiny_gguf), "q8_0")
    for model, kind in ((str(tiny_gguf.parent), "q8_0"), ("~/tiny.gguf", "q4_0")):  # neither is named by its folder
        assert run(model, kind).split() == [f"tiny-{kind}", "0", "MB", str(made.with_name(f"tiny-{kind}.gguf"))]
    assert "tiny-q8_0 is here already" in run(str(tiny_gguf), "q8_0")  # of what file, nobody knows
    with skydraft.load("tiny-q8_0", context=64) as q8_0, skydraft.load(tiny_gguf, context=64) as plain:
        assert q8_0.fingerprint != plain.fingerprint and q8_0.vocab.fingerprint == plain.vocab.fingerprint
        assert "Q8_0 checks" in q8_0.about_rows
    with pytest.raises(OptionError, match="type must be one of q4_0, q8_0, not 'q5_0'"):
        api.quantize(str(tiny_gguf), "q5_0")
    monkeypatch.setattr("skydraft.engines.llama.weights._TARGET_PARAMS", 1e3)
    with pytest.raises(OptionError, match="another model, which writes other texts"):
        quantize(tiny_gguf, made, "q4_0")
    assert not list(made.parent.glob("*.partial"))
