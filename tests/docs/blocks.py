"""What a page shows in blocks: fenced ones, and indented ones after an empty line; and the commands of a block."""

import re
import subprocess
from typing import NamedTuple

from ..starting import ROOT


class Block(NamedTuple):
    language: str  # of the fence, "" for an indented block
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]


_BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)\n```$|(?:\A|(?<=\n\n))((?:    [^\n]*\n|\s*\n)+)")


def blocks_of(page: str) -> list[Block]:
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [
        Block(language, fenced or re.sub("(?m)^    ", "", indented).strip("\n"))
        for language, fenced, indented in found
        if fenced or indented.strip()
    ]


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
