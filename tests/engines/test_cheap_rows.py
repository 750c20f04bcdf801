"""The demo's draft model in Q4_0, made on the spot: padded rows, several sequences and copies change no bit."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.cli.main import main
from skydraft.engines.base import Engine
from skydraft.engines.llama_weights import quantize
from skydraft.engines.llamacpp import LlamaCppEngine
from skydraft.engines.options import EngineOptions
from skydraft.errors import OptionError


@pytest.fixture(scope="module")
def q4_0(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "models" / "draft-q4_0.gguf"
    quantize(gguf_path, made, "q4_0")
    return made


@pytest.fixture(
    scope="module",
    params=[(2, 0), pytest.param((1, 0), marks=pytest.mark.long), pytest.param((1, 9000), marks=pytest.mark.long)],
)
def engine(request: pytest.FixtureRequest, q4_0: Path) -> Iterator[LlamaCppEngine]:
    num_threads, total_len = request.param
    options = EngineOptions(num_threads=num_threads, max_sequences=4, context_len=1200, total_len=total_len)
    with LlamaCppEngine(q4_0, options) as engine:
        yield engine


@pytest.mark.parametrize("length", [40, 300, pytest.param(900, marks=pytest.mark.long)])
def test_rows_keep_their_bits_as_the_probe_says(engine: LlamaCppEngine, length: int) -> None:
    seen, decode = list[list[int]](), engine._decode
    engine._decode = lambda fed, **how: (seen.append([each.place.number for each in fed]), decode(fed, **how))[1]  # type: ignore[method-assign,assignment,misc]
    pick, probed_len, engine.probed_len = random.Random(length), engine.probed_len, 10**9  # none is compared
    ids = np.random.default_rng(1).integers(100, 50000, length + 40).tolist()
    sequences = [engine.open(ids[number : length + number]) for number in range(4)]
    lengths = [sequence.length for sequence in sequences]
    for _ in range(4):
        left, feeds = engine.invariant_rows, []
        for sequence in pick.sample(sequences, pick.randrange(1, 5)):
            if num_rows := min(left, pick.choice([1, 1, 2, 3, 5, 16])):
                feeds.append((sequence, pick.sample(range(100, 50000), num_rows)))
                left -= num_rows
        together = [rows.copy() for rows in engine.extend_batch(feeds)]
        for (sequence, token_ids), rows in zip(feeds, together, strict=True):
            assert sequence.length == lengths[sequences.index(sequence)] + len(token_ids)
            sequence.truncate(lengths[sequences.index(sequence)])
            singly = np.concatenate([sequence.extend([token_id]).copy() for token_id in token_ids])
            assert np.array_equal(rows, singly)
            sequence.truncate(lengths[sequences.index(sequence)])
    for sequence in sequences:
        sequence.close()
    engine.probed_len, engine._decode = probed_len, decode  # type: ignore[method-assign]
    assert all(numbers == sorted(numbers) for numbers in seen) and seen  # else llama.cpp parts them


def test_an_edit_with_a_prediction_is_the_targets_own_text(q4_0: Path, gguf_path: Path) -> None:
    code = "\n".join(f"def area_{n}(width, height):\n    return width * height + {n}\n" for n in range(6))
    ask = f"Rename width to breadth and return the whole file.\n```python\n{code}```"
    options, params = EngineOptions(context_len=1024), DecodingParams(max_new_tokens=100)
    with LlamaCppEngine(q4_0, options) as edge, LlamaCppEngine(gguf_path, options) as cloud:
        pair: dict[str, Engine] = {"edge": edge, "cloud": cloud}
        plain = skydraft.generate(ask, **pair, plan=make_plan("cloud"), params=params).run()
        done = skydraft.generate(ask, **pair, plan=make_plan("lossless", k=4), params=params, prediction=code).run()
    assert done.token_ids == plain.token_ids and done.stats.exact and done.stats.num_right_copies > 20


def test_a_model_is_quantized_under_its_own_name_and_a_target_only_by_force(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["models", "quantize", str(gguf_path), "--type", "q8_0"])
    assert ended.value.code == 0
    name, size, _, path = capsys.readouterr().out.split()
    assert name == f"{gguf_path.stem}-q8_0" and Path(path) == tmp_path / "models" / f"{name}.gguf" and float(size) > 500
    with skydraft.load(name, context=64) as made, skydraft.load(gguf_path, context=64) as before:
        assert made.fingerprint != before.fingerprint and made.vocab.fingerprint == before.vocab.fingerprint
    monkeypatch.setattr("skydraft.engines.llama_weights._TARGET_PARAMS", 1e8)
    with pytest.raises(OptionError, match="another model, which writes other texts"):
        quantize(gguf_path, tmp_path / "x.gguf", "q4_0")
    assert not (tmp_path / "x.gguf").exists()
