"""One vocabulary and one colour code for origins: JSON, terminal, report and chat page say and show the same."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path
from typing import get_args

import pytest
from rich.style import Style

from skydraft.origins import LOOKS, Look
from skydraft.types import Origin

PAGE = Path(__file__).parent.parent / "skydraft" / "gateway" / "page"
# Degrees on the circle of colours; None: grey, which a terminal shows in its own colour for text.
HUES = {"green": (90, 170), "yellow": (20, 60), "cyan": (185, 205), "blue": (215, 250), "magenta": (300, 350)}


def hue_of(colour: str) -> float | None:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    return 360 * hue if saturation > 0.25 else None


def test_every_origin_of_json_has_a_look_and_no_other() -> None:
    assert list(LOOKS) == list(get_args(Origin))


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
def test_a_terminal_and_both_themes_have_one_hue(look: Look) -> None:
    color = Style.parse(look.terminal).color
    name = color.name if color else "default"
    for hue in (hue_of(look.light), hue_of(look.dark)):
        assert (hue is None) if name == "default" else (hue is not None and HUES[name][0] <= hue <= HUES[name][1])


def test_the_documentation_has_the_words_of_the_table() -> None:
    told = (PAGE.parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert [f"| `{origin}` | {look.meaning} |" in told for origin, look in LOOKS.items()] == [True] * len(LOOKS)


def test_the_page_has_the_colours_lines_and_words_of_the_table() -> None:
    style, words = (PAGE.joinpath(name).read_text(encoding="utf-8") for name in ("theme.css", "words.js"))
    english = words[: words.index("const zh")]
    for origin, look in LOOKS.items():
        assert f"--{origin}: light-dark({look.light}, {look.dark});" in style
        (rule,) = re.findall(rf"\.coloured \.{origin}, \.key \.{origin} {{([^}}]*)}}", style)
        line = [f"text-decoration-{part}" for part in ("line", "style", "thickness")]
        given = dict(re.findall(r"([\w-]+): ([^;]+);", rule))
        parts = [given.get(name, plain) for name, plain in zip(line, ("underline", "", "1.5px"), strict=True)]
        assert given["color"] == f"var(--{origin})"
        assert (" ".join(parts) if parts[0] != "none" else "none") == look.line
        assert f"'origin.{origin}': '{origin}'" in english and f"'meaning.{origin}': '{look.meaning}'" in english
