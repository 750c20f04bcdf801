"""Which draft models are used with what they learned: a small file beside the models, which may not be there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from skydraft.errors import ModelFilesError

_FILE = "adapters.json"


@dataclass(frozen=True, slots=True)
class Applied:
    """What stands for a model: an adapter's file, and the model with it merged in, a .gguf file or a folder.

    `trained_on` are digests of the prompts that the adapter was trained on: its file may go, or become another's.
    """

    adapter: str
    merged: str
    trained_on: tuple[str, ...] = ()


def merged_dir(cache: Path) -> Path:
    """Where merged models lie."""
    return cache / "adapted"


def applied(cache: Path) -> dict[str, Applied]:
    """By the names that a user gives models; empty where nothing is applied. Raises ModelFilesError."""
    path = cache / _FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Applied(entry["adapter"], entry["merged"], tuple(entry.get("trained_on", ())))
            for name, entry in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{path} cannot be read.", hint="Delete it: no adapter is applied then.") from error


def set_applied(cache: Path, model: str, entry: Applied | None) -> None:
    """Have a model stand for another, or for itself again. Raises OSError."""
    entries = applied(cache)
    entries.pop(model, None)
    if entry is not None:
        entries[model] = entry
    path = cache / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(_FILE + ".partial")
    text = json.dumps({name: asdict(each) for name, each in entries.items()}, indent=1)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
