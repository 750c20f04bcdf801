"""Toy models with all that a real vocabulary does to a decoder: merged tokens, byte fragments, special tokens; and one
whose KV depends on how it was fed.
"""

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.target import LocalVerifier
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Rows, Vocab
from skydraft.errors import EngineError
from skydraft.types import Prompt

from .grammars import GRAMMARS, HAS_LIBRARY

_CJK = "我你他员在说高兴人大的一"
_TEXTS = [*_CJK, "我们", "，我", "，", "、", "。", "！", "？", "。\n", "？”", "”", " 在"]
_TEXTS += [".", ",", "e", ".g", " U", "S", "a", "b", "ab", "3", "5", " ", "\n"]
_FRAGMENTS = [*(bytes([byte]) for byte in "员".encode()), "在".encode()[:2], "在".encode()[2:]]
PIECES = [text.encode() for text in _TEXTS] + _FRAGMENTS + [b"<tool_call>", b"<eos>"]
IDS = {piece: index for index, piece in enumerate(PIECES)}
TOOL, EOS = IDS[b"<tool_call>"], IDS[b"<eos>"]


def _encode(text: str) -> list[int]:
    return [IDS[char.encode()] for char in text]


def vocab(*, special_ids: Iterable[int] = (TOOL, EOS), end_ids: Iterable[int] = (EOS,)) -> Vocab:
    return Vocab(PIECES, _encode, special_ids=special_ids, end_ids=end_ids, eos_text="<eos>")


VOCAB = vocab()
PROMPT = "我3"
PROMPT_IDS = VOCAB.encode(PROMPT)
ASKED = Prompt(PROMPT_IDS)  # what both sides read, unless a test says otherwise


_TIMES = float(os.environ.get("SKYDRAFT_EXAMPLES", "1"))


def law(num_examples: int) -> settings:
    """The same examples in every run, however slow the machine; with SKYDRAFT_EXAMPLES=8 eight times as many."""
    return settings(max_examples=max(1, round(_TIMES * num_examples)), deadline=None, derandomize=True)


def ids(*texts: str | bytes) -> list[int]:
    return [IDS[text if isinstance(text, bytes) else text.encode()] for text in texts]


def array(token_ids: Seq[int]) -> Any:
    return np.array(token_ids, np.int32)


class FlakyEngine(ToyEngine):
    """Raises once, at the forward with logits number `fail_at`, before anything is written."""

    fail_at = -1
    num_asked = 0

    def forward(self, feeds: Any, *, want_logits: bool) -> Any:
        self.num_asked += want_logits
        if want_logits and self.num_asked == self.fail_at:
            raise EngineError("The device was lost.")
        return super().forward(feeds, want_logits=want_logits)


@lru_cache(maxsize=256)
def _random_tables(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, scale, (rows, len(PIECES))) for scale, rows in ((3, len(PIECES)), (1.5, len(PIECES)), (1, 7))]


@lru_cache(maxsize=256)
def tables(seed: int, drift: float = 0.0, *, sign: int = 1) -> tuple[Any, dict[str, Any]]:
    mixed = zip(_random_tables(seed), _random_tables(seed + 1000), strict=True)
    last, previous, position = ((sign * (own + drift * other)).astype(np.float32) for own, other in mixed)
    last[:, [EOS, TOOL]] = -2  # possible, not usual
    return last, {"by_previous": previous, "by_position": position}


def toy(
    seed: int, drift: float = 0.0, *, sign: int = 1, kind: type[ToyEngine] = ToyEngine, vocab: Vocab = VOCAB, **how: Any
) -> Any:
    """A random model; `drift` mixes in another one, `sign` -1 turns its taste round."""
    last, named = tables(seed, drift, sign=sign)
    return kind(vocab, last, **named, **how)


# (drift, sign) of a drafter relative to its target: the same model, good, poor, unrelated, adversarial
DRAFTERS = [(0.0, 1), (0.2, 1), (0.7, 1), (2.0, 1), (50.0, 1), (0.0, -1)]
seeds = st.integers(0, 60)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ToyEngine, ToyEngine]:
    seed = draw(seeds)
    drift, sign = draw(st.sampled_from(DRAFTERS))
    return toy(seed, drift, sign=sign), toy(seed)


@st.composite
def params(draw: st.DrawFn, max_new_tokens: int = 24) -> DecodingParams:
    """Any decoding parameters: greedy half of the time, each option off half of the time."""
    some_ids = st.integers(0, len(PIECES) - 1)
    options: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, 50),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.001, 0.9),
        "min_call_prob": st.floats(0.001, 0.9),
        "repetition_penalty": st.floats(0.5, 3),
        "frequency_penalty": st.floats(-2, 2),
        "penalty_window": st.sampled_from([1, 3]),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(some_ids, st.floats(-100, 100), max_size=3).map(dict.items),
        "full_stop_shift": st.floats(-20, 0),
        "no_repeat_ngram_size": st.integers(1, 4),
        "min_new_tokens": st.integers(1, 20),
        "stop_token_ids": st.lists(some_ids, min_size=1, max_size=3),
        "sentences": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["我们", "ab", "员", "。你", "在说", "3.", "，"]), min_size=1, max_size=3),
    }
    given = {name: draw(values) for name, values in options.items() if draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        given["think_start"] = draw(st.sampled_from(["", "a", "我们"]))
        given["think_end"] = draw(st.sampled_from(["b", "ab"]))
        if draw(st.booleans()):
            given["think_budget"] = draw(st.integers(1, 6))
    style = draw(st.sampled_from([None, None, "zh-short", "zh-detailed"]))
    if HAS_LIBRARY and draw(st.integers(0, 3)) == 0:  # few, since they end soon
        given, style = given | {"grammar": draw(st.sampled_from(GRAMMARS)), "sentences": 0}, None
    return decoding_params(
        style, temperature=draw(st.just(0.0) | st.floats(0.01, 2)), seed=draw(st.integers(0, 2**64 - 1)),
        max_new_tokens=draw(st.integers(1, max_new_tokens)), **given,
    )  # fmt: skip


def verifier_of(target: Engine, chosen: DecodingParams, *, max_rows: int = 64, prompt: Prompt = ASKED) -> LocalVerifier:
    return LocalVerifier(target, prompt, chosen, max_rows=max_rows)


PART = 4


class Partial(ToyEngine):
    """Its KV depends on whether a token came in a part of a prompt, and where in it, as that of a real model does.

    An entry of its cache is (token, position + 1000 for each row before it in its forward).
    """

    max_batch_rows = PART
    max_sequences = 3
    num_rows = 0

    def forward(self, feeds: Any, *, want_logits: bool) -> list[Rows]:
        rows = super().forward(feeds, want_logits=want_logits)
        for sequence, token_ids in feeds:
            self.num_rows += len(token_ids)
            start = len(sequence.slot) - len(token_ids)
            for index in range(len(token_ids)):
                token_id, position = sequence.slot[start + index]
                sequence.slot[start + index] = token_id, position + 7000 * index + (0 if want_logits else 7)
        return rows

    def _row(self, cache: Seq[tuple[int, int]]) -> Any:
        mixed = sum(position * (index + 3) for index, (_, position) in enumerate(cache)) % 1009
        return super()._row(cache) + np.sin(np.arange(self.vocab.size) * mixed).astype(np.float32)  # type: ignore[arg-type]
