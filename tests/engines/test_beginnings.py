"""The chat template's part of prompts: fed once and copied, whoever asks; with the bits of feeding it each time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.engines.options import EngineOptions
from skydraft.engines.prefix_cache import Parts
from skydraft.engines.rows import on_host
from skydraft.models import cache_dir, default_pair, known_models
from skydraft.models.cache import model_path
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import prompt_ids
from skydraft.types import Prompt, Reuse
from tests import toys
from tests.engines.test_prefix_cache import answer, engine_of
from tests.toys import law


def sharing(beginning: list[int], **changes: Any) -> Any:
    engine = engine_of(**changes)
    engine.prefixes.share(beginning)
    return engine


def feeding(beginning: list[int]) -> Any:
    """Feeds the beginning each time, in parts that end where it ends all the same."""
    return sharing(beginning, allocate_beginning=lambda: None)


beginnings = st.lists(st.integers(0, 20), min_size=1, max_size=11)


@law(150)
@given(beginnings, st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=6), st.data())
def test_copied_beginnings_have_the_bits_of_those_that_were_fed(
    beginning: list[int], texts: list[list[int]], data: st.DataObject
) -> None:
    engine = sharing(beginning)
    for text in texts:
        cut = data.draw(st.sampled_from([len(beginning)] * 4 + [len(beginning) // 2]))
        prompt = [*beginning[:cut], *text] or [3]
        reuse = data.draw(st.sampled_from([None, Reuse("a"), Reuse("b")]))
        got, rows, _ = answer(engine, prompt, reuse)
        expected, fresh, _ = answer(feeding(beginning), prompt, None)
        assert got == expected and np.array_equal(rows, fresh)


def test_this_toy_would_notice_a_beginning_whose_end_ends_no_part() -> None:
    beginning, prompt = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not np.array_equal(answer(feeding(beginning), prompt, None)[1], answer(engine_of(), prompt, None)[1])


@pytest.mark.parametrize("beginning_len", [1, 3, 4, 5, 9])
def test_nothing_but_the_beginning_goes_from_one_owner_to_another(beginning_len: int) -> None:
    beginning = list(range(beginning_len))
    engine, prompt = sharing(beginning), [*beginning, *[7] * 20]
    assert answer(engine, prompt, Reuse("ann"))[2] == 0
    for owner in (Reuse("bob"), None, Reuse("eve", exact=False)):
        assert answer(engine, prompt, owner)[2] == beginning_len
    assert answer(engine, prompt, Reuse("ann"))[2] == (beginning_len + 19) // 4 * 4
    assert answer(engine, [9, *prompt], None)[2] == 0


def test_the_beginning_takes_nobody_a_place() -> None:
    engine = sharing([1, 2, 3], max_sequences=2)
    answer(engine, [1, 2, 3, 4, 5], Reuse("ann"))
    answer(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Reuse("bob"))
    assert answer(engine, [1, 2, 3, 4, 5], Reuse("ann"))[2] == 4  # both are kept
    assert answer(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Reuse("bob"))[2] == 8
    held = [engine.open([1, 2, 3, number]) for number in range(2)]
    assert all(sequence.token_ids.tolist() == [1, 2, 3] for sequence in held)


def test_a_prompt_that_is_all_beginning_is_fed() -> None:
    engine, beginning = sharing([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5]
    for _ in range(2):
        assert np.array_equal(answer(engine, beginning, None)[1], answer(feeding(beginning), beginning, None)[1])


@law(100)
@given(st.integers(1, 6), beginnings, st.lists(st.integers(0, 20), max_size=30), st.booleans())
def test_parts_end_where_they_are_said_to(part_len: int, start: list[int], rest: list[int], begins: bool) -> None:
    parts = Parts(part_len, tuple(start))
    ids = np.array([*start, *rest] if begins else [21, *rest], np.int32)
    ends = {n for n in range(1, len(ids) + 1) if n % part_len == 0 or (begins and n == len(start))}
    for length in range(len(ids)):
        later = [end for end in ends if end > length]
        assert not later or parts.next_end(length, ids) == min(later)
        assert parts.last_end(ids[:length]) == max([end for end in ends if end <= length], default=0)


def test_a_conversation_cut_in_its_beginning_knows_what_is_whole() -> None:
    engine, prompt = sharing([1, 2, 3, 4, 5, 6]), toys.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    with engine.open(prompt.tolist()).engine as _:
        sequence = engine.open(prompt.tolist())
        for length, whole_len in ((9, 8), (7, 6), (6, 6), (5, 4), (3, 0)):
            sequence.truncate(length)
            assert sequence.whole_len == whole_len


@pytest.fixture
def tiny(folders: tuple[Path, Path]) -> Iterator[list[Any]]:
    """Two engines of one tiny checkpoint: one that copies beginnings, one that feeds them."""
    from skydraft.engines.transformers_text import TransformersEngine
    from tests.engines.tiny_checkpoint import OPTIONS

    engines = [TransformersEngine(folders[0], OPTIONS) for _ in range(2)]
    engines[1].allocate_beginning = lambda: None  # type: ignore[assignment,return-value]
    yield engines
    for engine in engines:
        engine.close()


def rows_of(engine: Any, prompts: list[list[int]]) -> tuple[Any, list[int]]:
    """(Rows of three tokens after each prompt, all prompts open at once; how many tokens of each were cached)."""
    opened = [(engine.open(prompt), prompt[-1]) for prompt in prompts]
    cached, rows = [sequence.take_prefill_cost().num_cached for sequence, _ in opened], []
    for sequence, token_id in opened:
        last = token_id
        for _ in range(3):
            row = on_host(sequence.extend([last])[0])
            rows.append(row)
            last = int(row.argmax())
    for sequence, _ in opened:
        sequence.close()
    return np.stack(rows), cached


@pytest.mark.parametrize("beginning_len", [1, 5, 16, 23])
def test_transformers_copies_to_the_bit(tiny: list[Any], beginning_len: int) -> None:
    rng = np.random.default_rng(beginning_len)
    size = tiny[0].vocab.size
    beginning = rng.integers(3, size, beginning_len).tolist()
    prompts = [[*beginning, *rng.integers(3, size, length).tolist()] for length in (1, 9, 30, 40)]
    for engine in tiny:
        engine.max_batch_rows = 16
        engine.prefixes.share(beginning)
    copied, cached = rows_of(tiny[0], prompts)
    fed, none = rows_of(tiny[1], prompts)
    assert np.array_equal(copied, fed)
    first = 1 if cached[1] == beginning_len else 2  # the prompt of one more token is long enough to have fed it
    assert cached[first:] == [beginning_len] * (4 - first) and none == [0] * 4


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("shared_cache", [False, True])
def test_llama_cpp_copies_to_the_bit(shared_cache: bool) -> None:
    pytest.importorskip("llama_cpp")
    name = default_pair().draft
    if not model_path(known_models()[name], cache_dir()).is_file():
        pytest.skip(f"no model: {name}")
    found = []
    for copies in (True, False):
        options = EngineOptions(context_len=128, max_sequences=3, num_threads=1, shared_cache=shared_cache)
        with skydraft.load(name, options, offline=True) as engine:
            if not copies:
                engine.allocate_beginning = lambda: None  # type: ignore[method-assign]
            texts = ("你好，世界。", "天空为什么蓝？", "1+1")
            prompts = [list(prompt_ids(engine.vocab, asked(text))) for text in texts]
            found.append(rows_of(engine, prompts))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1][0] == 0 and min(found[0][1][1:]) > 15 and found[1][1] == [0, 0, 0]


def test_what_a_session_is_told_to_be_cached_is_never_anothers_text() -> None:
    """The server's side of it: two labels, one prompt."""
    from skydraft.access.limits import Limits
    from skydraft.cloud.docket import Job
    from skydraft.cloud.worker import Worker
    from skydraft.config import DecodingParams
    from skydraft.protocol.codec import short_fingerprint
    from skydraft.protocol.values import OpenCall, Opening

    engine = sharing([1, 2, 3], max_sequences=4)
    worker = Worker(engine, Limits(max_sessions=4), execution="exact")
    prompt, costs = Prompt((1, 2, 3, *[5] * 12)), []
    for number, owner in enumerate(["ann", "bob", "ann"], 1):
        opening = Opening(
            short_fingerprint(engine.vocab.fingerprint), prompt, params=DecodingParams(), cache_scope="talk"
        )
        answers: list[Any] = []
        job = Job(OpenCall(number, 1, opening), owner, lambda answer, _, to=answers: to.append(answer), 0.0)
        worker.post(partial(worker.docket.take, job))
        worker.receive()
        while not answers:
            worker.step()
        costs.append(answers[0].cost.num_cached)
        worker.post(partial(worker.docket.close, number, owner))
        worker.receive()
    assert costs == [0, 3, 12]
