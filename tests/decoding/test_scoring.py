"""Scores: each is the log-softmax of the raw row of the model whose token it is, whatever the mode and the choice."""

from dataclasses import replace

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.prompts.messages import asked

from .. import reference


def row_after(engine: Engine, prefix: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [vocab] of the token after `prefix`, computed without the module under test."""
    row = reference.row_after(engine, prefix).astype(np.float64)
    return row - np.logaddexp.reduce(row)


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless", "fluency", "quality"])
@pytest.mark.parametrize(("temperature", "grammar"), [(0.0, ""), (0.9, ""), (0.7, "regex:语速[a-z]{3}(快|慢)+")])
def test_each_token_has_the_score_of_its_author(mode: str, temperature: float, grammar: str) -> None:
    if grammar:
        pytest.importorskip("llguidance")
    edge, target = open_toy("toy:drift=0.4"), open_toy("toy")
    params = DecodingParams(max_new_tokens=24, temperature=temperature, seed=3, grammar=grammar or None)
    plain = GenerateRequest(asked("语速"), plan=make_plan(mode), params=params)
    generation = api.start(replace(plain, num_best=2), edge=edge, cloud=target)
    scores = [told for done, _ in generation.rounds() for told in generation.scores(done)]
    assert [told.token_id for told in scores] == list(generation.token_ids)
    prefix = generation.request.prompts.edge.token_ids
    for told, origin in zip(scores, generation.origins, strict=True):
        want = row_after(edge if origin in ("edge", "skipped") else target, prefix)
        assert told.logprob == pytest.approx(want[told.token_id], abs=1e-6)
        assert [each for each, _ in told.best] == list(np.argsort(-want, kind="stable")[:2])
        prefix += (told.token_id,)
    same = api.start(plain, edge=edge, cloud=target).run()  # scoring changes no token
    assert same.token_ids == generation.token_ids and same.origins == generation.origins


def test_a_server_without_skydraft_tells_none() -> None:
    request = GenerateRequest(asked("语速"), plan=make_plan("cloud"), num_best=0)
    cloud = skydraft.connect("http://127.0.0.1:9/v1")
    with pytest.raises(OptionError, match="tells no log-probabilities"):
        api.start(request, edge=open_toy("toy"), cloud=cloud)
    cloud.close()
