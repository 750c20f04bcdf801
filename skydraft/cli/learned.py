"""What was learned, measured: held-out prompts in each mode, before and after, many texts side by side."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
from skydraft.learning.answering import side_by_side

MODES = ("edge", "quality", "auto", "answers")
MAX_PROMPTS = 8  # each is answered eight times, in about half the time that the training takes
_KEPT = 0.95
_ENOUGH = 100  # tokens, from which a share is known


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in numbers of tokens: the target wrote some itself, and the gate skipped some.

    Of those the target saw `num_audited` later, and would have written `num_agreed` itself. `right` is None without a
    check.
    """

    num_tokens: int
    num_calls: int
    num_written: int
    num_skipped: int
    num_audited: int
    num_agreed: int
    right: float | None


Answers: TypeAlias = Mapping[str, Sequence[Answer]]  # by mode
Question: TypeAlias = tuple[GenerateRequest, Check | None]


def judged(text: str, check: Check | None) -> float | None:
    return check.judge(text).score if check else None


def _answer_of(generation: Generation, check: Check | None) -> Answer:
    records = generation.run().records
    skipped = sum(each.num_committed for each in records if each.outcome in ("skipped", "fallback"))
    return Answer(
        sum(each.num_committed for each in records), sum(each.outcome == "verified" for each in records),
        sum(each.num_written for each in records), skipped, sum(each.num_audited for each in records),
        sum(each.num_agreed for each in records), judged(generation.text, check),
    )  # fmt: skip


def answers_in_modes(
    questions: Sequence[Question], adapter: str, pair: tuple[Engine, Cloud], kept: Path, deadline: float,
    on_done: Callable[[], None],
) -> Answers:  # fmt: skip
    """Answer the questions in each mode that this pair has, with an adapter; `kept` has what was answered before.

    The draft model alone answers only where answers are checked. Raises TimeoutError after `deadline`, and what was
    answered until then is kept.
    """
    edge, cloud = pair
    has = {
        "auto": api.is_calibrated(edge.adapters.choose(adapter, ()), cloud),
        "edge": any(each[1] for each in questions),
    }
    modes = [mode for mode in MODES if has.get(mode, True)]
    found = dict[str, Answer]()
    for line in kept.read_text().splitlines() if kept.exists() else ():
        with suppress(ValueError, TypeError):  # cut by a kill
            key, values = json.loads(line)
            found[key] = Answer(**values)
    lock = threading.Lock()

    def answer(at: tuple[str, int]) -> None:
        request, check = questions[at[1]]
        request = replace(request, plan=make_plan(at[0]), adapter=adapter)
        with api.start(request, edge=edge, cloud=cloud) as generation:
            made = _answer_of(generation, check)
        with lock:
            _keep(kept, _key(adapter, *at), made)
            found[_key(adapter, *at)] = made
            on_done()
        if time.monotonic() > deadline:
            raise TimeoutError("what was judged is kept")

    todo = [(mode, number) for mode in modes for number in range(len(questions))]
    side_by_side(answer, [at for at in todo if _key(adapter, *at) not in found])
    alone = {} if has["edge"] else {"edge": [Answer(1, 0, 0, 1, 0, 0, None)]}
    return alone | {mode: [found[_key(adapter, mode, number)] for number in range(len(questions))] for mode in modes}


def _keep(path: Path, key: str, answer: Answer) -> None:
    with path.open("a") as file:
        file.write(f"\n{json.dumps((key, asdict(answer)))}")


def _key(adapter: str, mode: str, number: int) -> str:
    return f"{Path(adapter).name} {mode} {number}"


def agreement(answers: Sequence[Answer], alone: float) -> float:
    """The share of tokens that are the target's own choice.

    Of the tokens that were skipped it is that of those which the target saw later; where these are few it is `alone`,
    the share of all tokens that the draft model would write as the target does.
    """
    audited, agreed = (sum(getattr(each, name) for each in answers) for name in ("num_audited", "num_agreed"))
    share = agreed / audited if audited >= _ENOUGH else alone
    skipped, total = (sum(getattr(each, name) for each in answers) for name in ("num_skipped", "num_tokens"))
    return float(1 - skipped * (1 - share) / total)


def _figures(answers: Sequence[Answer], alone: float) -> dict[str, float]:
    total = sum(each.num_tokens for each in answers)
    right = [each.right for each in answers if each.right is not None]
    found = {"agreement": agreement(answers, alone)} | ({"right": sum(right) / len(right)} if right else {})
    found["calls a token"] = sum(each.num_calls for each in answers) / total
    return found | {"written": sum(each.num_written for each in answers) / total}


def show_table(before: Answers, after: Answers, alone: tuple[float, float], cloud: Sequence[Answer]) -> None:
    """A line for each mode: each figure before and after. And the mode that keeps the agreement at the least cost.

    `alone` are the agreements of the draft model on all that was held out, `cloud` the target's own answers.
    """
    figures = {mode: _figures(answers, alone[1]) for mode, answers in after.items()}
    labels = figures["edge"].keys()
    click.echo(f"\n{len(after['quality'])} held-out prompts, before → after")
    click.echo(f"{'':<9}" + "".join(f"{label:>18}" for label in labels))
    for mode, now in figures.items():
        old = _figures(before[mode], alone[0]) if mode in before else {}
        cells = [f"{f'{old[label]:.3f}' if old else '–'} → {now[label]:.3f}" for label in labels]
        click.echo(f"{mode:<9}" + "".join(f"{cell:>18}" for cell in cells))
    if cloud:
        click.echo(f"{'cloud':<9}" + "".join(f"{value:>18.3f}" for value in _figures(cloud, 1.0).values()))
    if kept := [mode for mode, now in figures.items() if now["agreement"] >= _KEPT]:
        mode = min(kept, key=lambda mode: figures[mode]["written"])
        audits = " --audit-share 0.05" if mode == "edge" else ""
        click.echo(f"\n--mode {mode}{audits} keeps an agreement of {_KEPT:g} here, and asks the target least.")
    else:
        click.echo(f"\nNo mode here keeps an agreement of {_KEPT:g} but lossless and cloud.")
