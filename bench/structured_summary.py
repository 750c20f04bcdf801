"""The figures of what `bench.structured` has kept."""

from collections import Counter
from typing import Any

from skydraft.evaluation.tasks.checks import complaint, is_same, json_values, read_call

Line = dict[str, Any]


def show(lines: list[Line], schemas: list[Line], tasks: list[Line]) -> None:
    """Print the tables of what was kept of schemas and of tasks, of whichever there are any."""
    by_key = {line["key"]: line for line in lines}  # a line that stands in two files counts once
    schema_of, task_of = ({row["id"]: row for row in rows} for rows in (schemas, tasks))
    fitted, done = [], []
    for key, line in by_key.items():
        if row := schema_of.get(key.split()[0]):
            said = "" if line["finish"] == "length" else complaint(line["text"], row["schema"])
            fitted.append({**line, "complaint": said})
        elif task := task_of.get(key.split()[0]):
            found = found_in(line["text"], task)
            done.append({**line, "found": found, "right": is_same(found, task["answer"])})
    _show_schemas(fitted)
    _show_tasks(done)


def found_in(text: str, task: Line) -> Any:
    """What a text answers to a task, in a call or an object; None where there is none."""
    names = tuple(tool["function"]["name"] for tool in task.get("tools", ()))
    return read_call(text, names) if names else next(json_values(text), None)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.3f}" if whole else "-"


def _show_schemas(lines: list[Line]) -> None:
    of = {line["key"]: line for line in lines}
    for setting in sorted({key.partition(" ")[2] for key in of}):
        mine = [line for key, line in of.items() if key.partition(" ")[2] == setting]
        whole = [line for line in mine if line["finish"] != "length"]
        fits, num_tokens = sum(not line["complaint"] for line in whole), sum(line["num_tokens"] for line in mine)
        print(
            f"{setting:24} {len(mine)} texts: {fits} of {len(whole)} fit, {len(mine) - len(whole)} cut by length; "
            f"{num_tokens} tokens, forced {_share(sum(line['num_forced_tokens'] for line in mine), num_tokens)}"
        )
        for line in whole:
            if line["complaint"]:
                print(f"    {line['key']}: {line['complaint']}: {line['text']!r}")


def _show_tasks(lines: list[Line]) -> None:
    """Each way on the same tasks: those that were run in all of them."""
    ways = list(dict.fromkeys(line["key"].partition(" ")[2] for line in lines))
    num_ways = Counter(line["key"].split()[0] for line in lines)
    lines = [line for line in lines if num_ways[line["key"].split()[0]] == len(ways)]
    for way in ways:
        mine = [line for line in lines if line["key"].partition(" ")[2] == way]
        num_tokens = sum(line["num_tokens"] for line in mine)
        calls = sum(line["num_escalated"] for line in mine)
        kinds = {kind: [line for line in mine if line["key"].startswith(kind)] for kind in ("extract", "call")}
        right = ", ".join(f"{kind} {sum(line['right'] for line in of)} of {len(of)}" for kind, of in kinds.items())
        print(
            f"{way:12} right {sum(line['right'] for line in mine)} of {len(mine)} ({right}); "
            f"well-formed {sum(line['found'] is not None for line in mine)}, cut "
            f"{sum(line['finish'] == 'length' for line in mine)}; {num_tokens} tokens, calls a token "
            f"{_share(calls, num_tokens)}, forced {_share(sum(line['num_forced_tokens'] for line in mine), num_tokens)}"
        )
