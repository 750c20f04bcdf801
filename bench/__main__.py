"""Measurements and what the Makefile makes: `python -m bench` lists them, `python -m bench NAME` runs one."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def commands() -> dict[str, str]:
    """Each command, with the first line of what it says of itself. None is imported: some want what is not here."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("[a-z]*.py")}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in sorted(trees.items())
        if any(isinstance(each, ast.FunctionDef) and each.name == "main" for each in tree.body)
    }


def main(given: Sequence[str]) -> None:
    known = commands()
    if not given:
        print("\n".join(f"{name:<{max(map(len, known))}}  {about}" for name, about in known.items()))
        return
    if given[0] not in known:
        sys.exit(f"There is no {given[0]}: python -m bench lists what there is.")
    sys.argv = [f"python -m bench {given[0]}", *given[1:]]
    sys.exit(importlib.import_module(f"bench.{given[0]}").main())


if __name__ == "__main__":
    main(sys.argv[1:])
