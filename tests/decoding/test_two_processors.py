"""A target on a GPU and a draft model on the CPU, in one process: drafts come while the target computes."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.engines.toy import ToyEngine

from .. import toys
from ..serving import waiting
from . import test_laws as laws

PARAMS = DecodingParams(max_new_tokens=64, min_new_tokens=64)
LONG = {"max_new_tokens": 400, "min_new_tokens": 400, "no_repeat_ngram_size": 4}  # nothing to copy


def slow(engine: ToyEngine, ms: float, *, on_gpu: bool = False) -> Any:
    """A toy whose forwards take `ms` of no processor."""
    engine.on_gpu = on_gpu
    return waiting(engine, lambda: time.sleep(ms / 1e3))


def run(edge: ToyEngine, cloud: ToyEngine, mode: str, params: DecodingParams = PARAMS) -> Any:
    return laws.decode(make_plan(mode), params, edge, cloud, prompt="ab")


@pytest.mark.parametrize(("drift", "least"), [(0.0, 2.0), (0.7, 1.1), (8.0, 0.9)])
def test_the_target_never_waits_for_a_draft_model_elsewhere(drift: float, least: float) -> None:
    edge, cloud = slow(toys.toy(4, drift), 5), slow(toys.toy(4), 20, on_gpu=True)
    stream, race = (run(edge, cloud, mode) for mode in ("cloud", "lossless"))
    assert race.token_ids == stream.token_ids
    assert stream.records[-1].ended_ms / race.records[-1].ended_ms >= least


@toys.law(40)
@given(toys.pairs(), toys.params(), st.floats(0, 2))
def test_the_text_is_the_targets(pair: tuple[ToyEngine, ToyEngine], params: DecodingParams, ms: float) -> None:
    edge, cloud = pair
    plain = run(edge, cloud, "cloud", params)
    race = run(slow(edge, ms), slow(cloud, ms, on_gpu=True), "lossless", params)
    assert (race.token_ids, race.finish_reason) == (plain.token_ids, plain.finish_reason)


class LateLearner(ToyEngine):
    """It knows nothing of the first 60 tokens of a text, and reads two rows a forward at most."""

    max_output_rows = 2

    def _row(self, cache: list[tuple[int, int]]) -> Any:
        row = super()._row(cache)
        return row if len(cache) > 60 else -row


def test_a_draft_model_that_gave_up_reads_along_and_begins_again() -> None:
    edge = slow(toys.toy(4, kind=LateLearner), 1)
    params = replace(PARAMS, **LONG | {"max_new_tokens": 200, "min_new_tokens": 200})
    race = run(edge, slow(toys.toy(4), 6, on_gpu=True), "lossless", params)
    late = [record for record in race.records if record.base > 120]
    assert sum(record.num_accepted for record in late) > len(late)


def test_a_draft_model_that_is_always_late_gives_up() -> None:
    race = run(slow(toys.toy(4), 20), slow(toys.toy(4), 3, on_gpu=True), "lossless", replace(PARAMS, **LONG))
    assert sum(record.draft.num_passes for record in race.records) < 45
