"""Task files out of data that is here already: schemas and tools, and the captions of held-out clips.

    python -m bench.tasks DIR     writes DIR/schemas.jsonl and DIR/captions.jsonl

`skydraft compare --tasks` reads them; `make tasks` does both.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.speech import HELDOUT, truths
from bench.structured import MAX_TOKENS, all_tasks, request_of
from recipes.tiny_omni.attributes import CLASSES
from recipes.tiny_omni.wording import FRAMES, WORDINGS

Line = dict[str, Any]


def schemas() -> Iterator[Line]:
    """The 60 tasks of `bench.structured` in JSON: calls of tools, and extractions."""
    for task in all_tasks():
        request = request_of(task, "cloud", with_grammar=True)
        names = [tool["function"]["name"] for tool in request.tools]
        check = {"kind": "call", "names": names} if names else {"kind": "json"}
        yield {
            "id": task["id"],
            "messages": [{"role": each.role, "content": each.content} for each in request.messages],
            "tools": request.tools,
            "grammar": request.params.grammar,
            "check": check | {"answer": task["answer"]},
            "max_new_tokens": MAX_TOKENS,
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


if __name__ == "__main__":
    sys.exit(main())
