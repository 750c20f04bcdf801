"""Schemas and tools on the real pair: where calls are made, and whether texts fit and are right.

    python -m bench.structured auto [--to FILE] [--modes M,M] [--unseen]  tool_choice auto: calls where they are wanted
    python -m bench.structured odds [--unseen]                            how likely the target begins with a call
    python -m bench.structured stock --cloud URL [--serve HOST:PORT] [--ways W;W]
                                     60 schemas, and 60 tasks with one right answer, at a server without skydraft

What FILE has is not run again, so that parts can be run in turn (`--from N --num N`); any beginning is a fair part of
the whole. `--unseen` takes 48 calls and 60 questions on which nothing was chosen.
"""

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import skydraft
from bench.structured_auto import MODES, run_auto, show_auto, show_odds
from bench.structured_summary import show
from bench.workload import drafting, machine
from skydraft import DecodingParams, Engine, EngineOptions, Generation, api
from skydraft.decoding.request import GenerateRequest
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.tool_calls import calling_grammar

HERE = Path(__file__).parent
CONTEXT, SESSIONS, MAX_TOKENS = 1536, 4, 160
SYSTEM = "用 JSON 回答。"
Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    """The objects of a file, one a line; none where it is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def load_sides(num_threads: int) -> tuple[Engine, Engine]:
    """Draft and target, with room for the prompts of a set of tools."""
    pair = default_pair()
    options = EngineOptions(context_len=CONTEXT, max_sequences=SESSIONS, num_threads=num_threads)
    return skydraft.load(pair.draft, options), skydraft.load(pair.target, options)


def figures(generation: Generation) -> Line:
    """What is kept of a run."""
    stats = generation.stats
    names = ("num_tokens", "num_forced_tokens", "cloud_calls_per_token", "audited_agreement", "num_escalated")
    found = {name: getattr(stats, name) for name in names}
    return {"text": generation.text, "finish": generation.finish_reason, "token_ids": generation.token_ids, **found}


class Kept:
    """Results in a file, each under a key; what is there is not computed again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = {line["key"]: line for line in lines_of(path)}

    def get(self, key: str) -> Line | None:
        return self._lines.get(key)

    def add(self, key: str, line: Line) -> Line:
        self._lines[key] = {"key": key, **line}
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(self._lines[key], ensure_ascii=False) + "\n")
        return self._lines[key]


def request_of(task: Line, mode: str, with_grammar: bool) -> GenerateRequest:
    """A task as it is asked: tools through the template."""
    tools = task.get("tools") or []
    grammar = ""
    if with_grammar:
        functions = [tool["function"] for tool in tools]
        grammar = calling_grammar(functions, parallel=False) if tools else skydraft.json_schema(task["schema"])
    return GenerateRequest(
        asked(task["prompt"], None if tools else SYSTEM),
        plan=drafting(mode),
        params=DecodingParams(max_new_tokens=MAX_TOKENS, grammar=grammar),
        tools=tuple(tools),
        with_signals=True,
        cache_scope="bench",  # a set of tools is read once
    )


def all_schemas() -> list[Line]:
    """The schemas, in an order in which every six have kinds that are apart in the file."""
    every = lines_of(HERE / "structured_schemas.jsonl")
    return [row for first in range(10) for row in every[first::10]]


def all_tasks() -> list[Line]:
    """The tasks, calls and extractions in turn; calls of a set of tools, whose prompts begin alike, in pairs."""
    calls, every = all_calls("structured_tasks.jsonl"), lines_of(HERE / "structured_tasks.jsonl")
    return [task for both in zip(calls, every[len(calls) :], strict=True) for task in both]


def all_calls(file: str) -> list[Line]:
    """The lines of a file that have a set of tools, with these tools."""
    sets = {line["set"]: line["tools"] for line in lines_of(HERE / "structured_tools.jsonl")}
    every = lines_of(HERE / file)
    return [
        {**task, "tools": [{"type": "function", "function": each} for each in sets[task["set"]]]}
        for first in range(0, len(every), 2)
        for name in sets
        for task in [task for task in every if task.get("set") == name][first : first + 2]
    ]


def stock(to: Path, num_threads: int, clouds: dict[str, str], ways: list[str], first: int, num: int | None) -> None:
    """Schemas, then tasks, by a draft model here and each of these servers of the target."""
    kept, edge = Kept(to), skydraft.load(default_pair().draft, EngineOptions(CONTEXT, num_threads=num_threads))
    asked = [*all_schemas(), *all_tasks()][first : None if num is None else first + num]
    for (name, address), way, task in ((c, w, t) for t in asked for w in ways for c in clouds.items()):
        key = f"{task['id']} {way}, {name}"
        if kept.get(key) is None:
            request = request_of(task, way, with_grammar=True)
            with (
                closing(skydraft.connect(address, require=True, timeout_s=600)) as cloud,
                api.start(request, edge=edge, cloud=cloud) as generation,
            ):
                line = figures(generation.run()) | {"requests": generation.stats.num_requests}
            kept.add(key, line)
            print(key, line["finish"], line["num_tokens"], line["requests"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["auto", "odds", "stock"])
    parser.add_argument("--from", type=int, default=0, dest="first", help="skip so many")
    parser.add_argument("--num", type=int, default=None, help="at most so many")
    parser.add_argument("--to", type=Path, default=None, help="where results are kept (default: structured_WHAT.out)")
    parser.add_argument("--ways", default="quality;cloud", help="of stock: modes, with ; between them")
    parser.add_argument("--modes", default=",".join(MODES), help="only these of auto")
    parser.add_argument("--unseen", action="store_true", help="auto on other questions than the wording was chosen on")
    parser.add_argument("--cloud", help="of stock: a server without skydraft that has the target")
    parser.add_argument("--serve", help="of stock: skydraft serve with the target")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    print(machine())
    if given.what in ("auto", "odds"):
        files = (
            ["structured_unseen.jsonl"] if given.unseen else ["structured_questions.jsonl", "structured_tasks.jsonl"]
        )
        both = [task for file in files for task in all_calls(file)]
        if given.what == "odds":
            show_odds(both, load_sides(given.threads)[1], request_of)
            return
        kept = Kept(given.to or Path("structured_auto.out"))
        run_auto(both, load_sides(given.threads), kept, given.modes.split(","), request_of)
        show_auto(both, kept)
        return
    clouds = {name: url for name, url in (("stock", given.cloud), ("serve", given.serve)) if url}
    to = given.to or Path("structured_stock.out")
    stock(to, given.threads, clouds, given.ways.split(";"), given.first, given.num)
    show(lines_of(to), all_schemas(), all_tasks())


if __name__ == "__main__":
    main()
