"""Prompt files: one JSON object a line, or plain lines of text."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from skydraft.characters import from_json
from skydraft.config import CAPTION_PROMPT
from skydraft.errors import PromptError, naming, telling
from skydraft.files import read_file
from skydraft.lab.evaluation.records import PromptEntry


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: str = ""
    id: str = ""
    category: str = ""
    audio: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    sha256: str
    prompts: tuple[PromptEntry, ...]


def read_prompts(path: Path, *, limit: int | None = None) -> Workload:
    """Read at most `limit` prompts from a .jsonl file, or from a text file's lines. JSON lines have a prompt and
    optionally id, category and audio (a path relative to the file). Raises PromptError."""
    content, lines = read_lines(path, "prompt file")
    if path.suffix in (".jsonl", ".json"):
        prompts = [_read_json(path, number, line) for number, line in lines]
    else:
        prompts = [PromptEntry(id=f"line-{number}", prompt=line.strip()) for number, line in lines]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise PromptError(f"Two prompts in {path} have the same id.", hint="Give each prompt its own id.")
    if not prompts:
        raise PromptError(f"{path} holds no prompt.", hint="Write one prompt on each line.")
    return Workload(path.name, hashlib.sha256(content).hexdigest(), tuple(prompts[:limit]))


def read_lines(path: Path, what: str) -> tuple[bytes, list[tuple[int, str]]]:
    """Return a file's content, and its lines that are not empty, as (number, line). Raises PromptError."""
    with telling(PromptError, f"The {what} {path} cannot be read", "Check its name, or convert it with iconv."):
        content = read_file(path)
        text = content.decode("utf-8-sig")
    return content, [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _read_json(path: Path, number: int, line: str) -> PromptEntry:
    where, hint = f"Line {number} of {path}", 'Write {"prompt": "…"} or {"audio": "FILE"}.'
    with naming(PromptError, f"{where} is not a prompt", hint):
        entry = _Line.model_validate(from_json(line))
    if not entry.prompt.strip() and not entry.audio:
        raise PromptError(f"{where} has neither a prompt nor audio.", hint=hint)
    prompt, audio = entry.prompt or CAPTION_PROMPT, str(path.parent / entry.audio) if entry.audio else None
    return PromptEntry(id=entry.id or f"line-{number}", prompt=prompt, category=entry.category, audio=audio)
