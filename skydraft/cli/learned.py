"""What was learned, measured: held-out prompts in each mode, before and after.

One text at a time, as an app writes it: a draft model with many texts to read along with would hand each back late.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import click

from skydraft import api
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.evaluation.tasks.checks import Check
from skydraft.files import write_whole
from skydraft.learning.dataset import weights_of
from skydraft.types import StepRecord

_MODES = ("edge", "quality", "auto", "answers")
MAX_PROMPTS = 6  # each is answered eight times, which takes about as long as the training
_KEPT = 0.95
_ENOUGH = 100  # tokens, from which a share is known

Question: TypeAlias = tuple[GenerateRequest, Check | None]
Numbers: TypeAlias = "Counter[str]"
# Takes how many units there are; yields a function to call after each.
Counting: TypeAlias = Callable[[int], AbstractContextManager[Callable[..., None]]]


def numbers_of(records: Sequence[StepRecord], text: str, check: Check | None) -> Numbers:
    """Answers in numbers that can be added: tokens, milliseconds, calls, tokens that the target wrote itself, those
    that the gate skipped, of these those that the target saw later, and of these those that it would have written. And
    checks."""
    found = Counter[str]()
    if check:
        found.update({"checked": 1, "right": check.judge(text).score})  # a part of it may be right
    for each in records:
        skipped = each.num_committed if each.outcome in ("skipped", "fallback") else 0
        found.update(
            tokens=each.num_committed, calls=each.outcome == "verified", written=each.num_written, skipped=skipped,
            audited=each.num_audited, agreed=each.num_agreed, ms=round(each.wall_ms),
        )  # fmt: skip
    return found


def judge(
    questions: Sequence[Question], adapters: Sequence[str], pair: tuple[Engine, Cloud], kept: Path, counting: Counting
) -> list[dict[str, Numbers]]:
    """Answer the questions with each adapter, in each mode that it has; `kept` has what was answered before.

    The draft model alone answers only where answers are checked. An error out of `counting` ends it.
    """
    edge, cloud = pair
    weights_of(cloud)  # which waits until it answers
    is_checked, found = any(check for _, check in questions), dict[str, Numbers]()
    with suppress(OSError, ValueError):  # it is not there yet, or damaged
        found = {key: Counter(made) for key, made in json.loads(kept.read_bytes()).items()}

    def modes(adapter: str) -> list[str]:
        has_auto = api.is_calibrated(edge.adapters.choose(adapter, ()), cloud)
        return [mode for mode in _MODES if (mode != "auto" or has_auto) and (mode != "edge" or is_checked)]

    def asked(mode: str, adapter: str) -> list[Question]:
        plan = make_plan(mode)
        return [
            (replace(each, plan=plan.checking_start() if each.params.min_call_prob else plan, adapter=adapter), check)
            for each, check in questions
        ]

    def keep(key: str, answer: Generation) -> None:
        found[key] = numbers_of(answer.records, answer.text, jobs[key][1])
        write_whole(kept, json.dumps(found).encode(), 0o600)
        on_done()

    by_adapter = [{mode: asked(mode, adapter) for mode in modes(adapter)} for adapter in adapters]
    jobs = {_key(job): job for by_mode in by_adapter for of_mode in by_mode.values() for job in of_mode}
    missing = {key: request for key, (request, _) in jobs.items() if key not in found}
    with counting(len(missing)) as on_done:
        for key, request in missing.items():
            with api.start(request, edge=edge, cloud=cloud) as generation:
                keep(key, generation.run())
    alone = {} if is_checked else {"edge": Counter(tokens=1, skipped=1)}
    return [
        alone | {mode: sum((found[_key(job)] for job in of_mode), Counter[str]()) for mode, of_mode in by_mode.items()}
        for by_mode in by_adapter
    ]


def _key(job: Question) -> str:
    return hashlib.sha256(repr(job).encode()).hexdigest()


def figures(numbers: Numbers, alone: float) -> dict[str, float]:
    """The share of tokens that are the target's own choice, and the others, by what they are called. There is no speed
    of texts that were not timed, or many at a time.

    Of the tokens that were skipped the share is that of those which the target saw later; where these are few it is
    `alone`, that of all tokens that the draft model would write as the target does.
    """
    total, audited = numbers["tokens"], numbers["audited"]
    share = numbers["agreed"] / audited if audited >= _ENOUGH else alone
    found = {"agreement": 1 - numbers["skipped"] * (1 - share) / total}
    if numbers["checked"]:
        found["right"] = numbers["right"] / numbers["checked"]
    found |= {"calls a token": numbers["calls"] / total, "written": numbers["written"] / total}
    return found | ({"tokens/s": 1e3 * total / numbers["ms"]} if numbers["ms"] else {})


def show_table(
    before: Mapping[str, Numbers], after: Mapping[str, Numbers], alone: tuple[float, float], cloud: Numbers
) -> None:
    """A line for each mode: each figure before and after. And the mode that keeps the agreement at the least cost.

    `alone` are the agreements of the draft model on all that was held out, `cloud` is the target's own answers.
    """
    found = {mode: figures(numbers, alone[1]) for mode, numbers in after.items()}
    labels = list(found["quality"])
    click.echo(f"{'':<9}" + "".join(f"{label:>18}" for label in labels))

    def shown(figures: Mapping[str, float], label: str) -> str:
        return f"{figures[label]:.{1 if label == 'tokens/s' else 3}f}" if label in figures else "–"

    for mode, now in found.items():
        old = figures(before[mode], alone[0]) if mode in before else {}
        cells = [f"{shown(old, label)} → {shown(now, label)}" for label in labels]
        click.echo(f"{mode:<9}" + "".join(f"{cell:>18}" for cell in cells))
    if cloud:
        click.echo(f"{'cloud':<9}" + "".join(f"{shown(figures(cloud, 1.0), label):>18}" for label in labels))
    line = f"Only lossless and cloud keep an agreement of {_KEPT:g} here."
    if kept := [mode for mode, now in found.items() if now["agreement"] >= _KEPT]:
        mode = min(kept, key=lambda mode: found[mode]["written"])
        audits = " --audit-share 0.05" if mode == "edge" else ""
        line = f"--mode {mode}{audits} keeps an agreement of {_KEPT:g} here, and has the target write least."
    click.echo(f"\n{line}")
