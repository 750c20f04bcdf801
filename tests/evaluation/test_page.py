"""The page as a browser sees it: no error, no request, every prompt, and room for a phone."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ..comparing import PROMPTS, compared, generations

CHROMIUM = Path("/usr/bin/chromium")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--v=0",
]  # fmt: skip

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modes = "edge,cloud,lossless,quality,gate=entropy:1.5;k=4;eager"
    return compared(tmp_path_factory.mktemp("page"), modes=modes, tokens=40)


@pytest.fixture(scope="module")
def page(out: Path) -> Path:
    return out / "report.html"


def browse(page: Path, profile: Path, *args: str) -> tuple[str, list[str]]:
    """(what the browser prints, lines of its console); the profile is a new one each time."""
    command = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", *args, page.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if ":CONSOLE" in line]
    return done.stdout.decode(), console


def letters(text: str) -> str:
    """What is left without spaces, marks, and the control characters that toys write."""
    return "".join(filter(str.isalnum, text))


def test_the_console_is_silent_and_every_text_is_there(page: Path, out: Path, tmp_path: Path) -> None:
    dom, console = browse(page, tmp_path / "profile", "--dump-dom")
    assert console == []
    assert "<script" not in dom and all(f"<{tag}" in dom for tag in ("svg", "table", "details"))
    shown = html.unescape(re.sub("<[^>]*>", "", dom))
    for prompt in PROMPTS:
        assert prompt["prompt"] in shown
    together = letters(shown)
    for line in generations(out):
        assert letters("".join(line["pieces"])) in together


def test_the_page_asks_no_network(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    assert not re.search(
        r"""(?:\b(?:src|srcset|href|data|action)\s*=|url\(|@import)\s*["']?(?!["']?(?:data:|#))""", content
    )
    # What else begins with http are names of XML kinds, which nobody fetches.
    named = re.sub(r"""(?:xmlns(:\w+)?|rdf:resource)="https?://[^"]+\"""", "", content)
    assert "://" not in named


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["toys", "published"])
def test_a_phone_needs_no_sideways_scrolling_and_words_stand_out(page: Path, scheme: str, which: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    shown = page if which == "toys" else Path(__file__).parents[2] / "docs" / "report-zh-dev" / "report.html"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
        tab.goto(shown.as_uri())
        widths = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        colours = tab.evaluate(_COLOURS)
        browser.close()
    assert widths == [360, 360]
    paper = luminance(colours[0][1])
    assert (paper < 0.05) == (scheme == "dark")
    for ink, ground in colours:
        assert contrast(ink, ground) >= 4.5, (ink, ground)


# Ink and paper of the page, the answer, quiet words, heads and first columns of tables, and each origin of a token.
_COLOURS = """
[...document.querySelectorAll("body, .answer p, .quiet, thead th, td:first-child, .legend i")].map(element => {
  const ground = from => { const colour = getComputedStyle(from).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && from.parentElement ? ground(from.parentElement) : colour; };
  return [getComputedStyle(element).color, ground(element)]; })"""


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it, of rgb(r, g, b)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
