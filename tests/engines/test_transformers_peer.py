"""The peer of a comparison: transformers' own generation, plain and assisted, beside ours on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from skydraft.cli.main import run
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, MissingDependency
from skydraft.evaluation.comparison import LoadedPair

pytest.importorskip("torch")

from skydraft.engines.transformers_peer import HuggingFacePair, check_installed

MODES = "edge,cloud,lossless,hf-target,hf-assisted"


def test_the_peers_write_what_the_target_alone_writes(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    target, draft = folders
    prompts = tmp_path / "p.txt"
    prompts.write_text("今天天气很好\nThe small model drafts\n公园里有很多人\n", encoding="utf-8")
    models = ["--edge-model", str(draft), "--cloud-model", str(target), "--threads", "1", "--context", "640"]
    out = tmp_path / "out"
    args = ["compare", "--prompts", str(prompts), "--modes", MODES, "--max-new-tokens", "24", "--out", str(out)]
    assert run([*args, *models]) == 0
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    texts: dict[str, dict[str, list[int]]] = {}
    for line in lines:
        if line["kind"] == "generation":
            texts.setdefault(line["prompt"], {})[line["mode"]] = line["token_ids"]
    assert len(texts) == 3
    for found in texts.values():
        assert len(found["cloud"]) > 3
        assert found["lossless"] == found["hf-target"] == found["hf-assisted"] == found["cloud"]
    assert lines[0]["peer"] == "float32"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "another engine, whose speed is not ours to compare" in page
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    speeds = {setting["mode"]: setting["speed_over"] for setting in summary["settings"]}
    assert speeds["hf-assisted"]["hf-target"]["value"] > 0


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="as a peer") as failed:
        HuggingFacePair(tmp_path, tmp_path)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("names", "missing", "says"),
    [
        (("a.gguf", "b.gguf"), {"gguf"}, "gguf is not installed"),
        (("a", "b.gguf"), {"accelerate", "gguf"}, "accelerate and gguf are not installed"),
        (("a", "b"), {"accelerate", "gguf"}, ""),
        (("a", "b"), {"transformers"}, "transformers is not installed"),
    ],
)
def test_a_package_that_reads_the_files_is_named(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], missing: set[str], says: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    paths = [Path(name) for name in names]
    if not says:
        return check_installed(paths)
    pair = LoadedPair(*(SimpleNamespace(path=path) for path in paths), "", EngineOptions())  # type: ignore[arg-type]
    for ask in (lambda: check_installed(paths), lambda: HuggingFacePair(*paths), lambda: pair.peer_paths):
        with pytest.raises(MissingDependency, match=says) as failed:
            ask()
        assert "pip install 'skydraft[transformers]'" in str(failed.value)
