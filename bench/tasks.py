"""Task files out of data that is here already: schemas and tools, and the captions of held-out clips.

    python -m bench tasks DIR     writes DIR/schemas.jsonl and DIR/captions.jsonl

`skydraft compare --tasks` reads them; `make tasks` does both.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.speech import HELDOUT, truths
from recipes.tiny_omni.attributes import CLASSES
from recipes.tiny_omni.wording import FRAMES, WORDINGS
from skydraft import json_schema
from skydraft.prompts.messages import asked
from skydraft.prompts.tool_calls import calling_grammar

HERE, _TASKS = Path(__file__).parent, "structured_tasks.jsonl"
Line = dict[str, Any]


def lines_of(file: str) -> list[Line]:
    return [json.loads(line) for line in HERE.joinpath(file).read_text(encoding="utf-8").splitlines()]


def schemas() -> Iterator[Line]:
    """60 tasks in JSON, in turn a call of one of several tools and an extraction."""
    tools_of, every = {line["set"]: line["tools"] for line in lines_of("structured_tools.jsonl")}, lines_of(_TASKS)
    calls, others = [task for task in every if "set" in task], [task for task in every if "set" not in task]
    for task in (task for both in zip(calls, others, strict=True) for task in both):
        tools = tools_of.get(task.get("set"), [])
        system = None if tools else "用 JSON 回答。"
        grammar = calling_grammar(tools, parallel=False) if tools else json_schema(task["schema"])
        check = {"kind": "call", "names": [tool["name"] for tool in tools]} if tools else {"kind": "json"}
        yield {
            "id": task["id"],
            "messages": [{"role": each.role, "content": each.content} for each in asked(task["prompt"], system)],
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "grammar": grammar,
            "check": check | {"answer": task["answer"]},
            "max_new_tokens": 160,
        }


def captions() -> Iterator[Line]:
    """The held-out clips, whose captions must state five attributes."""
    patterns = {name: {value: _pattern(name, value) for value in values} for name, values in CLASSES.items()}
    for line in map(json.loads, HELDOUT.read_text(encoding="utf-8").splitlines()):
        check = {"kind": "fields", "answer": truths()[line["id"]], "patterns": patterns}
        yield {"id": line["id"], "audio": str(HELDOUT.parent / line["audio"]), "check": check, "max_new_tokens": 96}


def _pattern(name: str, value: str) -> str:
    begins = (frame.partition("{")[0] for frame in FRAMES[name])
    return f"(?:{_any_of(begins)})(?:{_any_of(WORDINGS[name, value])})"


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("schemas", schemas()), ("captions", captions())):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        folder.joinpath(f"{name}.jsonl").write_text(text, encoding="utf-8")
    return 0
