"""The files of the chat page: its words, the files of other projects, and that nothing comes from elsewhere."""

import hashlib
import json
import re
from pathlib import Path

from skydraft.gateway import app

PAGE = Path(app.__file__).parent / "page"
OWN = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir() if path.is_file()}
ENGLISH, CHINESE = (json.loads((PAGE / f"words/{name}.json").read_text(encoding="utf-8")) for name in ("en", "zh"))
# Keys that are put together: the page shows an unknown name as it is.
FAMILIES = ("link", "mode", "about", "figure", "outcome", "origin", "meaning", "reason")


def test_both_languages_have_the_words_that_the_page_uses_and_no_others() -> None:
    assert list(ENGLISH) == list(CHINESE)
    for key, english in ENGLISH.items():
        assert english and CHINESE[key]
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", CHINESE[key])), key
    source = "".join(OWN.values())
    marked = set(re.findall(r'data-word(?:-\w+)?="([^"]+)"', OWN["index.html"]))
    said = set(re.findall(r"(?:(?:say|announce|note)\(|worded\([^']*?, )'([\w.-]+)'", source))
    plain = {key for key in ENGLISH if key.split(".")[0] not in FAMILIES or "." not in key}
    assert marked and said and marked | said <= ENGLISH.keys()
    assert {key for key in plain if not re.search(rf"""['"`]{re.escape(key)}['"`]""", source)} == set()


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for name, text in OWN.items():
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert not re.search(r"innerHTML|outerHTML|AdjacentHTML|\beval\(|new Function|document\.write", text), name
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", OWN["index.html"])


def test_the_files_of_other_projects_are_those_that_were_published() -> None:
    lines = (PAGE / "vendor/VERSIONS").read_text(encoding="utf-8").splitlines()
    named = [line.split() for line in lines if not line.startswith("#")]
    held = {path.name for path in (PAGE / "vendor").iterdir()}
    assert held == {"VERSIONS"} | {name for file, *_ in named for name in (file, f"{file.split('.')[0]}.LICENSE")}
    for file, *_, sha256 in named:
        assert hashlib.sha256((PAGE / "vendor" / file).read_bytes()).hexdigest() == sha256, file
