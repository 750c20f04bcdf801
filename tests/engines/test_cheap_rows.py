"""The demo's draft model in Q4_0, made on the spot: padded rows, several sequences and copies change no bit."""

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
from skydraft.engines.llama.engine import LlamaCppEngine
from skydraft.engines.llama.weights import quantize
from skydraft.engines.options import EngineOptions
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.errors import OptionError


@pytest.fixture(scope="module")
def q4_0(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "models" / "draft-q4_0.gguf"
    quantize(gguf_path, made, "q4_0")
    return made


LATER = [("q4_0", 1, 0), ("q4_0", 1, 9000), ("gguf_path", 2, 0)]


@pytest.fixture(
    scope="module", params=[("q4_0", 2, 0), *(pytest.param(each, marks=pytest.mark.long) for each in LATER)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaCppEngine]:
    """Of the file in Q4_0, and of the one as it is published."""
    file, num_threads, total_len = request.param
    options = EngineOptions(num_threads=num_threads, max_sequences=4, context_len=1200, total_len=total_len)
    with LlamaCppEngine(request.getfixturevalue(file), options) as engine:
        yield engine


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
