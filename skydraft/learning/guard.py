"""The guard: general prompts that come along, so that what is learned in one field does not cost the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.learning.collect import Collector
from skydraft.learning.lesson import Lesson
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud

MAX_NEW_TOKENS = 32
_FILE = "guard_prompts.txt"


def guard_prompts() -> tuple[str, ...]:
    """The prompts: descriptions, questions, lists, code, English; one a line."""
    text = resources.files("skydraft.learning").joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line.strip())


def guard_lessons(folder: Path, edge: Engine, cloud: Engine | Cloud, on_done: Callable[[], None]) -> list[Lesson]:
    """What the target answers to the guard's prompts, greedily, as the draft model reads them; `on_done` after each.

    Answers are kept in `folder`, so that a target is asked once. Raises a SkydraftError.
    """
    collector = Collector(folder)
    weights = cloud.fingerprint if isinstance(cloud, Engine) else cloud.weights(quick=False)[1]
    kept = {
        lesson.prompt_ids: lesson
        for lesson in collector.store.lessons(Counter())
        if (lesson.target, lesson.vocab) == (weights, edge.vocab.fingerprint)
    }
    found = []
    params = DecodingParams(max_new_tokens=MAX_NEW_TOKENS)
    for prompt in guard_prompts():
        messages = asked(prompt)
        key = read_prompt(edge, messages).edge.token_ids
        if key not in kept:
            request = GenerateRequest(messages, plan=make_plan("cloud"), params=params)
            with collector.start(request, edge=edge, cloud=cloud) as generation:
                generation.run()
            kept.update(
                (each.prompt_ids, each) for each in collector.store.lessons(Counter()) if each.prompt_ids == key
            )
        found.append(kept[key])
        on_done()
    collector.close()
    return found
