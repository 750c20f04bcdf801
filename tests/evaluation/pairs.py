"""Toy pairs with prompts to compare them on, and the calibration fitted to them."""

from __future__ import annotations

from functools import cache

import numpy as np

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.calibration import Calibration, PairSide
from skydraft.decoding.plan import make_plan
from skydraft.decoding.question import plain
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.evaluation.fitting import Told, fit, told
from skydraft.evaluation.scoring import Scorer

NUM_TOKENS = 64
_CHARACTERS = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面"


@cache
def prompts(seed: int, num_prompts: int = 30) -> tuple[str, ...]:
    """Prompts of six characters, the same in every run."""
    rng = np.random.default_rng(seed)
    return tuple("".join(rng.choice(list(_CHARACTERS), 6)) for _ in range(num_prompts))


@cache
def pair(drift: float) -> tuple[Engine, Engine]:
    """A draft model and its target."""
    return open_toy(f"toy:drift={drift}"), open_toy("toy")


def side(engine: Engine) -> PairSide:
    return PairSide(name=engine.name, fingerprint=engine.fingerprint)


def tell(edge: Engine, cloud: Engine, asked: tuple[str, ...], num_tokens: int = NUM_TOKENS) -> list[Told]:
    """Both models' own texts as labelled positions."""
    params = DecodingParams(max_new_tokens=num_tokens)
    scorer = Scorer(edge, cloud, params)
    texts = []
    for prompt in asked:
        for path, mode in (("target", "cloud"), ("draft", "edge")):
            done = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=params).run()
            texts.append(told(scorer.score(prompt, plain(cloud.vocab.encode(prompt)), done.token_ids), path))  # type: ignore[arg-type]
    scorer.close()
    return texts


@cache
def calibration(drift: float) -> Calibration:
    """The calibration of the pair, fitted on the prompts of seed 0."""
    edge, cloud = pair(drift)
    return fit(
        tell(edge, cloud, prompts(0)), side(edge), side(cloud),
        workload="toys", sha256="0" * 64, date="2026-01-01", num_prompts=30, max_new_tokens=NUM_TOKENS,
    )  # fmt: skip
