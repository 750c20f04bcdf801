"""Loops of tools against a running gateway: whether they end in a sentence that has what the tool found.

    skydraft gateway --threads 1 --context 2048 --parallel 1
    python -m bench.tool_loops http://localhost:8137 [--modes auto,quality,cloud] [--to FILE]

Each of the questions has a tool of its own. A loop sends `tool_choice: auto` each time and answers each call, for at
most six turns, as agents do. What FILE has is not run again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx

Line = dict[str, Any]
HERE = Path(__file__).parent
MAX_TURNS, MAX_TOKENS, PATIENCE_S = 6, 256, 600


def loop(url: str, mode: str, task: Line) -> Line:
    """The calls of one loop, and its last message."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    body = {"model": f"skydraft-{mode}", "tools": [{"type": "function", "function": task["tool"]}]}
    calls = list[Line]()
    for _ in range(MAX_TURNS):
        given = body | {"messages": messages, "max_tokens": MAX_TOKENS}
        answer = httpx.post(f"{url}/v1/chat/completions", json=given, timeout=PATIENCE_S).raise_for_status().json()
        message = answer["choices"][0]["message"]
        if not message.get("tool_calls"):
            return {"calls": calls, "said": message["content"]}
        messages.append(message)
        for call in message["tool_calls"]:
            calls.append(json.loads(call["function"]["arguments"]))
            found = next((found for part, found in task["results"].items() if part in str(calls[-1])), "not found")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return {"calls": calls, "said": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--modes", default="auto,quality,cloud")
    parser.add_argument("--to", type=Path, default=Path("tool_loops.out"))
    given = parser.parse_args()
    tasks = [json.loads(line) for line in (HERE / "tool_loops.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = list(map(json.loads, given.to.read_text(encoding="utf-8").splitlines())) if given.to.exists() else []
    kept = {(line["id"], line["mode"]): line for line in lines}
    for mode in given.modes.split(","):
        for task in tasks:
            if (task["id"], mode) not in kept:
                line = {"id": task["id"], "mode": mode, **loop(given.url, mode, task)}
                line["fact"] = any(fact in line["said"] for fact in task["facts"])
                kept[task["id"], mode] = line
                with given.to.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
            line = kept[task["id"], mode]
            print(f"{mode} {task['id']}: {len(line['calls'])} calls, {line['fact']}, {line['said'][:80]!r}", flush=True)
        mine = [line for (_, of), line in kept.items() if of == mode]
        ended, right = (sum(bool(line[name]) for line in mine) for name in ("said", "fact"))
        print(f"{mode}: {len(mine)} loops, {ended} end in a sentence, {right} with what the tool found")


if __name__ == "__main__":
    main()
