"""Prompt files: one JSON object a line, or plain lines of text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skydraft.config import CAPTION_PROMPT
from skydraft.errors import PromptError
from skydraft.evaluation.records import PromptEntry


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: str = ""
    id: str = ""
    category: str = ""
    reference: str | None = None
    references: tuple[str, ...] = Field(default=(), strict=False)
    audio: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a file, and the hash of what it held."""

    name: str
    sha256: str
    prompts: tuple[PromptEntry, ...]


def read_prompts(
    path: Path, *, limit: int | None = None, start: int = 0, step: int = 1, categories: tuple[str, ...] = ()
) -> Workload:
    """Every `step`th prompt of a .jsonl file or of a text file's lines, from the `start`th on.

    Those of `categories` alone if any are given, at most `limit`. Fields of a line: prompt; id, category, references
    and audio (a path beside the file) at will. Raises PromptError.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"The prompt file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8.", hint="Convert it first, with iconv say.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    read = _read_json if path.suffix in (".jsonl", ".json") else _read_plain
    prompts = [read(path, number, line) for number, line in lines]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise PromptError(f"Two prompts in {path} have the same id.", hint="Ids name results, so each must be new.")
    chosen = [prompt for prompt in prompts[start::step] if not categories or prompt.category in categories][:limit]
    if not chosen:
        raise PromptError(f"{path} holds no prompt" + (f" of the categories {', '.join(categories)}." if categories
                          else "." if not prompts else " that was asked for."))  # fmt: skip
    return Workload(path.name, hashlib.sha256(content).hexdigest(), tuple(chosen))


def _read_json(path: Path, number: int, line: str) -> PromptEntry:
    try:
        found = _Line.model_validate(json.loads(line))
    except json.JSONDecodeError as error:
        raise PromptError(f"Line {number} of {path} is not valid JSON: {error.msg}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise PromptError(
            f"Line {number} of {path} is not a prompt: {where}: {first['msg']}.",
            hint='It needs at least {"prompt": "…"}.',
        ) from error
    if not found.prompt.strip() and not found.audio:
        raise PromptError(f"Line {number} of {path} has neither a prompt nor audio.")
    references = found.references + ((found.reference,) if found.reference else ())
    return PromptEntry(
        id=found.id or f"line-{number}",
        prompt=found.prompt or CAPTION_PROMPT,
        category=found.category,
        references=references,
        audio=str(path.parent / found.audio) if found.audio else None,
    )


def _read_plain(path: Path, number: int, line: str) -> PromptEntry:
    return PromptEntry(id=f"line-{number}", prompt=line.strip())
