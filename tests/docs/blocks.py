"""What a page shows in blocks: fenced ones, and indented ones after an empty line; and the commands of a block."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    language: str  # of the fence, "" for an indented block
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]


def blocks_of(page: str) -> list[Block]:
    return list(_blocks((ROOT / page).read_text(encoding="utf-8").splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    at = 0
    while at < len(lines):
        if fence := re.fullmatch(r"```(\w*)", lines[at]):
            end = lines.index("```", at + 1)
            yield Block(fence[1], "\n".join(lines[at + 1 : end]))
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield Block("", "\n".join(line[4:] for line in lines[at:end]).rstrip())
            at = end
        else:
            at += 1


def commands_of(block: Block) -> list[str]:
    """The commands of a block of shell: lines, joined where bash says that one alone is not complete."""
    commands: list[str] = []
    pending = ""
    for line in block.text.splitlines():
        pending += line
        if line.endswith("\\") or not _is_complete(pending):
            pending += "\n"
        elif pending.strip():
            commands.append(pending)
            pending = ""
    assert not pending, f"this is no whole command: {pending}"
    return commands


def _is_complete(text: str) -> bool:
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    return checked.returncode == 0 and "here-document" not in checked.stderr
