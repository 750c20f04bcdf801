"""Every measurement can be started: it finds what it imports and says what it takes."""

from __future__ import annotations

import importlib
import sys
from contextlib import closing
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
NEEDS = dict.fromkeys(("baselines", "bare_loop", "speed"), "llama_cpp") | {
    "peers": "torch", "screenshots": "playwright", "speech_identity": "transformers",
}  # fmt: skip
# of others
PARTS = {
    "__init__", "bare_loop", "emulated_link", "server", "structured_auto", "structured_speed", "structured_summary",
    "workload",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py")))
def test_a_measurement_imports_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__
    if name in PARTS:
        return
    assert f"python -m bench.{name}" in module.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in " ".join(capsys.readouterr().out.split())


def test_all_ways_write_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The generation of transformers, plain and assisted, writes what the target alone writes in ours."""
    pytest.importorskip("torch")
    import skydraft
    from bench.peers import HuggingFacePair, measure, show, ways
    from skydraft.engines.options import EngineOptions

    from .engines.tiny_checkpoint import save_model

    prompts = ("今天天气很好", "The small model drafts", "公园里有很多人")
    target = save_model(tmp_path / "target", "Qwen2Config", seed=1)
    draft = save_model(tmp_path / "draft", "Qwen2Config", seed=2, like=target)
    options = EngineOptions(context_len=640, num_threads=1)
    with closing(skydraft.load(str(draft), options)) as edge, closing(skydraft.load(str(target), options)) as cloud:
        kept = measure(ways(edge, cloud, HuggingFacePair(draft, target), 24), prompts)
    texts = [found for found, _ in kept.values()]
    assert all(found == texts[0] for found in texts) and min(map(len, texts[0])) > 3
    show(kept)
    assert "hf-assisted / hf-target: " in capsys.readouterr().out
