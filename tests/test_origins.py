"""One vocabulary and one colour code for origins: JSON, terminal, report and chat page say and show the same."""

import json
import re
from pathlib import Path
from typing import get_args

from skydraft.origins import LOOKS
from skydraft.types import Origin

PAGE = Path(__file__).parent.parent / "skydraft" / "gateway" / "page"


def test_every_origin_of_json_has_a_look_and_words_in_the_documentation() -> None:
    assert list(LOOKS) == list(get_args(Origin))
    told = (PAGE.parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert [f"| `{origin}` | {look.meaning} |" in told for origin, look in LOOKS.items()] == [True] * len(LOOKS)


def test_the_page_has_the_colours_lines_and_words_of_the_table() -> None:
    style = (PAGE / "theme.css").read_text(encoding="utf-8")
    english = json.loads((PAGE / "words/en.json").read_text(encoding="utf-8"))
    for origin, look in LOOKS.items():
        assert f"--{origin}: light-dark({look.light}, {look.dark});" in style
        (rule,) = re.findall(rf"\.coloured \.{origin}, \.key \.{origin} {{([^}}]*)}}", style)
        line = [f"text-decoration-{part}" for part in ("line", "style", "thickness")]
        given = dict(re.findall(r"([\w-]+): ([^;]+);", rule))
        parts = [given.get(name, plain) for name, plain in zip(line, ("underline", "", "1.5px"), strict=True)]
        assert given["color"] == f"var(--{origin})"
        assert (" ".join(parts) if parts[0] != "none" else "none") == look.line
        assert (english[f"origin.{origin}"], english[f"meaning.{origin}"]) == (origin, look.meaning)
