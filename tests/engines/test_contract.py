"""The contract of every engine, run over all kinds of them."""

import gc
import weakref
from contextlib import ExitStack, closing
from itertools import product
from typing import Any

import numpy as np
import pytest

from skydraft.engines.base import Engine
from skydraft.engines.prefix_cache import PrefixCache
from skydraft.errors import EngineError, PromptError
from skydraft.types import Reuse

from .conftest import Load
from .contract import TOLERANCE, check_rollback, largest_difference, one_by_one, rows_after, some_text
from .test_lock import is_free
from .tiny_checkpoint import clip, spoken

TORCH = ("text", "omni")


class TestContract:
    def test_rows_are_those_of_one_token_at_a_time_whatever_came_between(self, engine: Engine) -> None:
        """llama.cpp promises that for feeds within `invariant_rows` alone, and then to the bit, as the toy does."""
        is_exact = engine.name not in TORCH
        text = some_text(engine, 40)
        max_rows = min(engine.invariant_rows, 6) if is_exact else 6
        worst = largest_difference(engine, text, one_by_one(engine, text), max_rows=max_rows)
        assert worst == 0 if is_exact else worst < TOLERANCE

    def test_the_same_feeds_give_the_same_bits_after_any_rollback(self, engine: Engine) -> None:
        check_rollback(engine, *(spoken(engine, 1, 1.3) if engine.takes_audio else (some_text(engine, 12), ())))

    @pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1), (3, 5, 2)])
    def test_a_batch_is_its_feeds_one_by_one(self, engine: Engine, sizes: tuple[int, ...]) -> None:
        if sum(sizes) > engine.invariant_rows and engine.name not in TORCH:
            pytest.skip("more rows than it promises")
        texts = [some_text(engine, 3 + 2 * size, size) for size in sizes]
        with ExitStack() as stack:
            feeds = list[Any]()
            for text, size in zip(texts, sizes, strict=True):
                sequence = stack.enter_context(closing(engine.open(text[: len(text) - size + 1])))
                feeds.append((sequence, text[sequence.length :]))
            batch = [rows.copy() for rows in engine.extend_batch(feeds)]
            for rows, (sequence, fed), text in zip(batch, feeds, texts, strict=True):
                expected = one_by_one(engine, text)[-len(fed) :]
                assert np.abs(rows - expected).max() <= (TOLERANCE if engine.name in TORCH else 0)
                assert sequence.token_ids.tolist() == text

    @pytest.mark.parametrize("part_len", [1, 5, 64])
    def test_opening_leaves_one_to_feed(self, engine: Engine, part_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Opening leaves the last token of the prompt to feed."""
        prompt = some_text(engine, 23)
        expected = one_by_one(engine, prompt)[-1]
        monkeypatch.setattr(engine, "max_batch_rows", part_len)
        with closing(engine.begin(prompt)) as sequence:
            ends = [0]
            while engine.prefill(sequence, prompt):
                ends.append(sequence.length)
            assert ends == list(range(0, 22, part_len)) and sequence.token_ids.tolist() == prompt[:-1]
            row = sequence.extend(prompt[-1:])[0]
            if part_len == 1 or not engine.name.startswith("qwen"):  # in 4 bits, parts differ by more
                assert np.abs(row - expected).max() < TOLERANCE
            assert row.argmax() == expected.argmax()

    @pytest.mark.parametrize("beginning_len", [1, 16, 23])
    def test_kv_that_is_copied_or_kept_changes_no_bit(
        self, engine: Engine, beginning_len: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the beginning of all prompts, which is copied; and of whole parts, of 16, of an earlier prompt."""
        beginning = some_text(engine, beginning_len, beginning_len)
        prompts = [[*beginning, *some_text(engine, length, length)] for length in (1, 9, 30, 40)]
        ways = {True: (None, Reuse("mine"), Reuse("mine")), False: (None,)}
        monkeypatch.setattr(engine, "max_batch_rows", 16)
        found = dict[bool, list[Any]]()
        for copies in ways:
            monkeypatch.setattr(engine, "prefixes", PrefixCache())
            monkeypatch.setattr(engine, "can_copy", copies)
            engine.prefixes.beginning, found[copies] = tuple(beginning), []
            for prompt, reuse in product(prompts, ways[copies]):
                with closing(engine.open(prompt, (), reuse)) as sequence:
                    num_cached = sequence.take_prefill_cost().num_cached
                    found[copies].append((num_cached, rows_after(sequence, prompt[-1])))
            engine.forget_kept()
        for at, (prompt, (none, expected)) in enumerate(zip(prompts, found[False], strict=True)):
            cached, rows = zip(*found[True][3 * at : 3 * at + 3], strict=True)
            assert all(np.array_equal(each, expected) for each in rows) and none == 0
            whole = max(beginning_len, (len(prompt) - 1) // 16 * 16)
            assert not at or cached == (beginning_len, beginning_len, whole)

    def test_what_is_refused_changes_nothing(self, engine: Engine) -> None:
        size, most, (one, two, three) = engine.vocab.size, engine.context_len, some_text(engine, 3)
        with closing(engine.open([one, two, three])) as sequence:
            for wrong in ([], [size], [-1], [one, 2**40], [one] * most):
                with pytest.raises(EngineError):
                    sequence.extend(wrong)
            for wrong_len in (-1, 3, 100):
                with pytest.raises(EngineError, match="truncate"):
                    sequence.truncate(wrong_len)
            with pytest.raises(EngineError, match="only once"):
                engine.extend_batch([(sequence, [one]), (sequence, [one])])
            assert sequence.token_ids.tolist() == [one, two] and engine.kv_length(sequence) == 2
            assert sequence.extend([one]).shape == (1, size)
        for prompt in ([], [one] * most, [size], [one, -1]):
            with pytest.raises(PromptError):
                engine.open(prompt)
        assert is_free(engine.lock)

    def test_what_is_closed_refuses_everything(self, load: Load) -> None:
        """llama.cpp would be given the null pointer, or a model that is no longer there."""
        with load() as engine:
            prompt = some_text(engine, 3)
            vocab, sequence, begun = engine.vocab, engine.open(prompt), engine.begin(prompt)
            media = engine.media(clip(1, 0.31)) if engine.takes_audio else None
            begun.close()
            for refused in (
                begun.extend, lambda ids: engine.prefill(begun, ids), lambda ids: begun.truncate(0),
                lambda ids: engine.extend_batch([(sequence, ids), (begun, ids)]),
            ):  # fmt: skip
                with pytest.raises(EngineError, match=r"^This sequence is closed\.$"):
                    refused(prompt)
        uses = [
            lambda: engine.open(prompt), lambda: engine.check_prompt(prompt), lambda: engine.prefill(sequence, prompt),
            lambda: sequence.extend(prompt), lambda: sequence.truncate(sequence.length),
        ]  # fmt: skip
        if engine.name.startswith("qwen"):
            uses.append(lambda: vocab.encode("a"))
        if media is not None:
            uses += [lambda: engine.media(clip(1, 0.31)), lambda: engine.audio_tokens(media)]
        for use in uses:
            with pytest.raises(EngineError, match=r" is closed\.$"):
                use()
        assert sequence.token_ids.tolist() == prompt[:2] and vocab.decode(prompt)
        for close in (sequence.close, begun.close, engine.close, sequence.close):
            close()

    def test_an_engine_that_is_dropped_is_freed_at_once(self, load: Load) -> None:
        engine = load()
        if engine.name.startswith("qwen"):
            pytest.skip("llama.cpp frees a model where it is closed")
        gone, vocab = weakref.ref(engine), engine.vocab
        gc.collect()
        gc.disable()
        try:
            del engine
            assert gone() is None, "something refers to the engine in a circle"
        finally:
            gc.enable()
        assert vocab.encode("a")
