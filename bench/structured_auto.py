"""Tools with `tool_choice` `auto`: whether a call is made where one is right, and none where none is wanted."""

import itertools
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from skydraft import Engine, api
from skydraft.choosing.constraints import call_openers
from skydraft.config import MIN_CALL_PROB
from skydraft.decoding.request import GenerateRequest
from skydraft.evaluation.tasks.checks import is_same
from skydraft.prompts.pair import read_prompt
from skydraft.prompts.tool_calls import CallReader, CallText, EnforcedReader, Piece, may_answer

Line = dict[str, Any]
MODES = ("auto", "quality", "cloud", "edge")
PART_LEN = 32  # of prompts, so that one answer takes up nearly all that another with the same tools has read
_ENOUGH = 80  # characters of an answer that has not begun as a call


def run_auto(
    tasks: list[Line], sides: tuple[Engine, Engine], kept: Any, modes: list[str],
    request_of: Callable[[Line, str, bool], GenerateRequest],
) -> None:  # fmt: skip
    """Run what `kept` does not have: tasks with an answer as `required` and as `auto`, the others as `auto`."""
    for engine in sides:
        engine.max_batch_rows = PART_LEN
    for mode, way, task in itertools.product(modes, ("auto", "required"), tasks):
        if way == "auto" or "answer" in task:
            key = f"{task['id']} {mode} {way}"
            line = kept.get(key) or kept.add(key, _answer(task, request_of(task, mode, way == "required"), sides))
            print(f"{key}: {line['calls'] or line['said'][:40]!r}", flush=True)


def _answer(task: Line, request: GenerateRequest, sides: tuple[Engine, Engine]) -> Line:
    """The calls of an answer and its text, as the gateway gives them."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in task["tools"]}
    reader = EnforcedReader() if request.params.grammar else CallReader(tools)
    said, calls = "", list[Line]()
    if not request.params.grammar:
        messages, plan = tuple(may_answer(request.messages)), request.plan.checking_start()
        params = replace(request.params, min_call_prob=MIN_CALL_PROB)
        request = replace(request, messages=messages, plan=plan, params=params)
    with api.start(request, edge=sides[0], cloud=sides[1]) as generation:
        for token in generation:
            said += "".join(_taken(piece, calls) for piece in reader.push(token.text))
            if len(said) > _ENOUGH and not calls:
                break
        said += "".join(_taken(piece, calls) for piece in reader.finish())
        return {"text": generation.text, "said": said, "calls": calls}


def _taken(piece: Piece, calls: list[Line]) -> str:
    if not isinstance(piece, CallText):
        return piece if isinstance(piece, str) else ""
    if piece.name:
        calls.append({"name": piece.name, "arguments": ""})
    calls[-1]["arguments"] += piece.arguments
    return ""


def show_odds(tasks: list[Line], engine: Engine, request_of: Callable[[Line, str, bool], GenerateRequest]) -> None:
    """Print how likely it is that an answer begins as a call, for lines that want one and others, and how far these are
    apart: the area under the curve, and what a least chance of `MIN_CALL_PROB` gets right."""
    openers, chances = call_openers(engine.vocab), {True: list[float](), False: list[float]()}
    with closing(engine.begin([0])) as sequence:
        for task in sorted(tasks, key=lambda task: str(task["set"])):  # one set of tools after the other
            request = request_of(task, "cloud", False)
            ids = read_prompt(engine, may_answer(request.messages), tools=request.tools).target.token_ids
            sequence.align(ids[:-1])
            while sequence.length < len(ids):
                row = sequence.extend(ids[sequence.length : sequence.length + engine.max_output_rows])[-1]
            weights = np.exp(row.astype(np.float64) - row.max())
            chances["answer" in task].append(weights[openers].sum() / weights.sum())
    wanted, others = (np.array(chances[each]) for each in (True, False))
    print(f"wanted {np.sort(wanted).round(2)}\nothers {np.sort(others).round(2)}")
    area = np.mean(wanted[:, None] > others) + np.mean(wanted[:, None] == others) / 2
    print(f"AUROC {area:.3f}; called where wanted {np.sum(wanted >= MIN_CALL_PROB)} of {len(wanted)}, not called "
          f"elsewhere {np.sum(others < MIN_CALL_PROB)} of {len(others)}")  # fmt: skip


def show_auto(tasks: list[Line], kept: Any) -> None:
    """Print for each mode what `required` does right, what of it `auto` calls, and where `auto` calls for nothing."""
    for mode in MODES:
        of = {
            way: {task["id"]: kept.get(f"{task['id']} {mode} {way}") for task in tasks} for way in ("required", "auto")
        }
        calls = [task for task in tasks if "answer" in task and of["required"][task["id"]] and of["auto"][task["id"]]]
        right = {way: {task["id"] for task in calls if _is_right(of[way][task["id"]], task)} for way in of}
        called = {task["id"] for task in calls if of["auto"][task["id"]]["calls"]}
        asked = [of["auto"][task["id"]] for task in tasks if "answer" not in task and of["auto"][task["id"]]]
        if not calls and not asked:
            continue
        wanted = right["required"]
        print(
            f"{mode:8} required right {len(wanted)} of {len(calls)}; of these auto calls {len(called & wanted)} and is "
            f"right {len(right['auto'] & wanted)} (of all: calls {len(called)}, right {len(right['auto'])}); "
            f"none wanted: no call {sum(not line['calls'] for line in asked)} of {len(asked)}"
        )


def _is_right(line: Line, task: Line) -> bool:
    found = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in line["calls"]]
    return is_same(found, [task["answer"]])
