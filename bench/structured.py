"""Schemas and tools on the real pair: whether texts fit, whether they are right, and what a grammar costs.

    python -m bench.structured schemas [--from N] [--num N] [--to FILE]   60 schemas: what fits, lossless == cloud
    python -m bench.structured tasks [--from N] [--num N] [--to FILE]     60 tasks with one right answer, in six ways
    python -m bench.structured auto [--to FILE] [--modes M,M] [--unseen]  tool_choice auto: calls where they are wanted
    python -m bench.structured odds [--unseen]                            how likely the target begins with a call
    python -m bench.structured stock --cloud URL [--serve HOST:PORT] [--ways W;W]   both at a server without skydraft
    python -m bench.structured speed [--num N]                            tokens a second with and without a grammar
    python -m bench.structured summary FILE...                            the figures of what `--to` has written

`schemas` runs quality, lossless and cloud at T = 0 and 0.8, and for every fourth schema lossless against a server
process. What FILE has is not run again, so that parts can be run in turn; any beginning is a fair part of the whole.
`--unseen` takes 48 calls and 60 questions on which nothing was chosen.
"""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.server import ServerProcess
from bench.structured_auto import MODES, PART_LEN, run_auto, show_auto, show_odds
from bench.structured_speed import speed
from bench.structured_summary import found_in, show
from bench.workload import drafting, machine
from skydraft import DecodingParams, Engine, EngineOptions, Generation, api
from skydraft.choosing.chooser import Chooser
from skydraft.decoding.request import GenerateRequest
from skydraft.evaluation.tasks.checks import is_same
from skydraft.gating.calibration import Calibration, find_calibration
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.tool_calls import calling_grammar

HERE = Path(__file__).parent
CONTEXT, SESSIONS, SEED, MAX_TOKENS = 1536, 4, 11, 160
SYSTEM = "用 JSON 回答。"
# How each row of the table of tasks is written: mode, and whether there is a grammar.
WAYS = {
    "edge, free": ("edge", False), "edge": ("edge", True), "quality": ("quality", True), "auto": ("auto", True),
    "cloud": ("cloud", True), "cloud, free": ("cloud", False),
}  # fmt: skip
JUDGED = ("edge", "quality", "auto")
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


def schemas(chosen: list[Line], to: Path, num_threads: int) -> None:
    """Run the schemas that `to` does not have yet."""
    kept, (edge, cloud) = Kept(to), load_sides(num_threads)
    with served(num_threads) as server, closing(skydraft.connect(server.address)) as remote:
        for number, (row, temperature) in enumerate((row, t) for row in chosen for t in (0.0, 0.8)):
            params = DecodingParams(
                max_new_tokens=MAX_TOKENS,
                temperature=temperature,
                seed=SEED,
                grammar=skydraft.json_schema(row["schema"]),
            )
            texts: dict[str, Line] = {}
            ways = {"cloud": cloud, "lossless": cloud, "quality": cloud, "remote lossless": remote}
            if int(row["id"][-2:]) % 4:
                del ways["remote lossless"]
            for name, target in ways.items():
                key, plan = f"{row['id']} T={temperature} {name}", drafting(name.split()[-1])
                if (line := kept.get(key)) is None:
                    sides = {"edge": edge, "cloud": target, "plan": plan, "params": params}
                    with skydraft.generate(row["prompt"], system=SYSTEM, **sides) as generation:
                        line = figures(generation.run())
                    line = kept.add(key, line)
                texts[name] = line
            same = all(texts[name]["token_ids"] == texts["cloud"]["token_ids"] for name in texts if "lossless" in name)
            print(f"{number + 1}/{2 * len(chosen)} {row['id']} T={temperature} lossless == cloud: {same}", flush=True)


def served(num_threads: int) -> Any:
    """A server of the target in a process of its own, with what the sides here have."""
    options = ("--context", str(CONTEXT), "--max-sessions", str(SESSIONS), "--threads", str(num_threads))
    return _Stopping(ServerProcess(default_pair().target, *options))


class _Stopping:
    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def __enter__(self) -> ServerProcess:
        return self._server

    def __exit__(self, *_: object) -> None:
        self._server.stop()


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


def tasks(chosen: list[Line], to: Path, num_threads: int, ways: list[str]) -> None:
    """Run the tasks that `to` does not have yet, and judge what gated modes wrote."""
    kept, (edge, cloud) = Kept(to), load_sides(num_threads)
    calibration = find_calibration([], edge.fingerprint, cloud.fingerprint, edge.name)
    for engine in (edge, cloud):
        engine.max_batch_rows = PART_LEN
    for number, task in enumerate(chosen):
        said, known = [], dict[tuple[int, ...], Line]()
        for way in ways:
            mode, with_grammar = WAYS[way]
            key = f"{task['id']} {way}"
            line = kept.get(key)
            if line is None:
                request = request_of(task, mode, with_grammar)
                with api.start(request, edge=edge, cloud=cloud) as generation:
                    risks = risks_of(calibration, generation) if way in JUDGED else []
                    line = figures(generation.run()) | {"origins": generation.origins, "risks": risks}
                if way in JUDGED:
                    if generation.token_ids not in known:
                        known[generation.token_ids] = judged(cloud, request, generation)
                    line |= known[generation.token_ids]
                line = kept.add(key, line)
            right = is_same(found_in(line["text"], task), task["answer"])
            said.append(f"{way}: {'right' if right else 'wrong'}")
        print(f"{number + 1}/{len(chosen)} {task['id']} {', '.join(said)}", flush=True)


def stock(to: Path, num_threads: int, clouds: dict[str, str], ways: list[str], first: int, num: int | None) -> None:
    """Schemas, then tasks, by a draft model here and each of these servers of the target."""
    kept, edge = Kept(to), skydraft.load(default_pair().draft, EngineOptions(CONTEXT, num_threads=num_threads))
    asked = [*all_schemas(), *all_tasks()][first : None if num is None else first + num]
    for (name, address), way, task in ((c, w, t) for t in asked for w in ways for c in clouds.items()):
        key = f"{task['id']} {way}, {name}"
        if kept.get(key) is None:
            request = request_of(task, WAYS[way][0], with_grammar=True)
            with (
                closing(skydraft.connect(address, require=True, timeout_s=600)) as cloud,
                api.start(request, edge=edge, cloud=cloud) as generation,
            ):
                line = figures(generation.run()) | {"requests": generation.stats.num_requests}
            kept.add(key, line)
            print(key, line["finish"], line["num_tokens"], line["requests"], flush=True)


def risks_of(calibration: Calibration, generation: Generation) -> list[tuple[int, float]]:
    """Run a generation to its end: the tokens that were skipped, and how likely each was thought to disagree."""
    return [
        (done.block.base + at, calibration.risk([signals]))
        for done, _ in generation.rounds()
        if done.record.outcome == "skipped"
        for at, signals in enumerate(done.block.signals)
    ]


def judged(cloud: Engine, request: GenerateRequest, generation: Generation) -> Line:
    """Which tokens of a text the target would have written there too, and to which the grammar left no rival."""
    prompt, text = list(generation.prompts.target.token_ids), list(generation.token_ids)
    chooser, whole = Chooser(request.params, cloud.vocab, len(prompt)), np.array(prompt + text, np.int32)
    with closing(cloud.open(prompt, (), request.reuse)) as sequence:
        agrees, forced = [], []
        for start in range(len(prompt) - 1, len(whole) - 1, cloud.invariant_rows):
            end = min(start + cloud.invariant_rows, len(whole) - 1)
            for at, row in enumerate(sequence.extend(whole[start:end]), start + 1):
                agrees.append(chooser.choose(row, whole[:at]) == whole[at])
                forced.append(chooser.forced(whole[:at]) is not None)
    return {"agrees": list(map(bool, agrees)), "forced": forced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["schemas", "tasks", "auto", "odds", "stock", "speed", "summary"])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--from", type=int, default=0, dest="first", help="skip so many")
    parser.add_argument("--num", type=int, default=None, help="at most so many")
    parser.add_argument("--to", type=Path, default=None, help="where results are kept (default: structured_WHAT.out)")
    parser.add_argument("--ways", default=";".join(WAYS), help="only these of the tasks, with ; between them")
    parser.add_argument("--modes", default=",".join(MODES), help="only these of auto")
    parser.add_argument("--unseen", action="store_true", help="auto on other questions than the wording was chosen on")
    parser.add_argument("--cloud", help="of stock: a server without skydraft that has the target")
    parser.add_argument("--serve", help="of stock: skydraft serve with the target")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.what == "summary":
        show([line for path in given.files for line in lines_of(path)], all_schemas(), all_tasks())
        return
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
    if given.what == "speed":
        without_tools = [task for task in all_tasks() if "schema" in task]
        speed(load_sides(1), without_tools[: given.num or 12], request_of, PART_LEN)
        return
    if given.what == "stock":
        clouds = {name: url for name, url in (("stock", given.cloud), ("serve", given.serve)) if url}
        to = given.to or Path("structured_stock.out")
        stock(to, given.threads, clouds, given.ways.split(";"), given.first, given.num)
        show(lines_of(to), all_schemas(), all_tasks())
        return
    every = all_schemas() if given.what == "schemas" else all_tasks()
    chosen = every[given.first :][: given.num]
    to = given.to or Path(f"structured_{given.what}.out")
    if given.what == "schemas":
        schemas(chosen, to, given.threads)
    else:
        tasks(chosen, to, given.threads, given.ways.split(";"))
    show(lines_of(to), all_schemas(), all_tasks())


if __name__ == "__main__":
    sys.exit(main())
