"""Scores: choices, drafts, signals and likelihoods are those of a model that reads each prefix afresh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from skydraft.config import DecodingParams
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ToyEngine
from skydraft.gating.gates import measure
from skydraft.lab.evaluation.records import ScoreLine, signals_entry
from skydraft.lab.evaluation.scoring import scores
from skydraft.prompts.pair import PromptPair
from skydraft.types import Prompt

from .. import reference, toys
from ..toys import PROMPT_IDS, VOCAB, law

Pair = tuple[ToyEngine, ToyEngine]
texts = st.lists(st.integers(0, VOCAB.size - 1), max_size=12).map(tuple)
PROMPT = PromptPair(Prompt(PROMPT_IDS), Prompt(PROMPT_IDS))


def fresh(pair: Pair, params: DecodingParams, token_ids: Sequence[int]) -> ScoreLine:
    """The score of one text alone."""
    (line,) = scores(pair, "p", PROMPT, params, [tuple(token_ids)])
    return line


@law(30)
@given(toys.pairs(), toys.params(), texts)
def test_scores_equal_prefixes_read_afresh(pair: Pair, params: DecodingParams, token_ids: tuple[int, ...]) -> None:
    line = fresh(pair, params, token_ids)
    greedy = replace(params, temperature=0.0)
    assert (line.prompt, line.token_ids, line.style) == ("p", token_ids, None)
    for at, token_id in enumerate(token_ids):
        prefix = [*PROMPT_IDS, *token_ids[:at]]
        mine, theirs = (reference.next_token(model, prefix, len(PROMPT_IDS), greedy) for model in pair)
        assert (line.drafted[at], line.choices[at]) == (mine, theirs)
        assert line.choice_pieces[at] == VOCAB.written([theirs])
        draft_row, target_row = (reference.row_after(model, prefix) for model in pair)
        assert line.signals[at] == signals_entry(measure(draft_row))
        assert line.nll[at] == pytest.approx(-log_softmax(target_row.astype(np.float64))[token_id], abs=2e-5)


@law(30)
@given(toys.pairs(), st.lists(st.tuples(st.booleans(), texts), min_size=2, max_size=6), st.data())
def test_texts_are_scored_as_if_alone(pair: Pair, found: list[tuple[bool, tuple[int, ...]]], data: Any) -> None:
    params, last, asked = DecodingParams(), tuple[int, ...](), list[tuple[int, ...]]()
    for grows, tail in found:
        shared = data.draw(st.integers(0, len(last))) if grows else 0
        asked.append(last := (*last[:shared], *tail))
    asked.append(last)  # the same once more
    assert list(scores(pair, "p", PROMPT, params, asked)) == [fresh(pair, params, text) for text in asked]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7])
def test_each_row_goes_in_once_within_what_keeps_it_exact(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text, few, rows, forward = tuple(range(1, 18)), (toys.toy(3, 0.5), toys.toy(3)), [], ToyEngine.forward

    def counting(engine: ToyEngine, feeds: Any, *, want_logits: bool) -> Any:
        rows.extend(len(token_ids) for _, token_ids in feeds if want_logits)
        return forward(engine, feeds, want_logits=want_logits)

    alone = fresh((toys.toy(3, 0.5), toys.toy(3)), DecodingParams(), text)
    monkeypatch.setattr(ToyEngine, "forward", counting)
    for engine in few:
        engine.profile = RowProfile(invariant_rows=max_rows, forward_ms=(1.0,))
    made = list(scores(few, "p", PROMPT, DecodingParams(), [text, (*text[:13], 9, 9), (1, 2)]))
    assert made[0] == alone
    assert max(rows) == max_rows and sum(rows) == 2 * (17 + 2)  # what a text shares with the last is not computed again
