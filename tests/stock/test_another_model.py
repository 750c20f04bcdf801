"""Which model answers behind an address: what is learned there belongs to the model that the server names, and where
another one answers than before, while no text is under way, that is an error, and then all is well."""

import asyncio
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, api, make_plan
from skydraft.edge.stock.dialect import About
from skydraft.edge.stock.ids import LlamaServer
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, SkydraftError, TargetChanged, VocabularyMismatch
from skydraft.lab.learning.calibrating import write_calibration
from skydraft.lab.learning.collect import Collector
from skydraft.lab.learning.dataset import weights_of
from skydraft.lab.learning.lessons import Store
from skydraft.models import KNOWN, cache_dir, default_pair
from skydraft.models.cache import model_path
from tests.cli.conftest import Invoke, invoke  # noqa: F401
from tests.evaluation import pairs
from tests.hostile.texts import LENGTH, TARGET, letters, write
from tests.serving import free_port
from tests.stock.conftest import llama_server
from tests.stock.fakes import IDS, fake
from tests.thinking.scripts import thinking_toy

# --- Names


def test_lessons_of_two_models_do_not_mix_and_of_none_are_kept(tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    said, names = list[str](), ["org/toy", "org/My-Toyota-7B", "org/" + "x" * 900]
    for dialect, name in [*(("vllm", name) for name in names), ("llama-server", "bad\x1bname")]:
        with fake(dialect, TARGET, name=name) as server, closing(skydraft.connect(server.url)) as cloud:
            assert cloud.facts(5.0) and not said
            collector = Collector(tmp_path, notify=said.append)
            collector.keep(write(cloud, "cloud").run())
            collector.close()
            if name not in names:
                with pytest.raises(OptionError, match="which model"):
                    weights_of(cloud)
    assert len(said) == 2 and "does not tell which model" in said[0]  # the reason, and at the end how many
    assert [lesson.target for lesson in Store(tmp_path).lessons(Counter())] == [f"name:{each}" for each in names]
    _, out, _ = invoke("learn", "status", str(tmp_path))
    assert "target org/toy)" in out and "target org/My-Toyota-7B)" in out


@pytest.mark.parametrize(("target", "served", "knows"), [
    ("toy", "toy", True), ("toy", "My-Toyota-7B", False), ("Toyota", "My-Toyota-7B", False), ("oy", "toy", False),
])  # fmt: skip
def test_a_calibration_fits_the_whole_name_alone(
    target: str, served: str, knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    made = pairs.calibration(0.3)
    write_calibration(made.model_copy(update={"target": made.target.model_copy(update={"name": target})}), tmp_path)
    with fake("vllm", TARGET, name=served) as server, closing(skydraft.connect(server.url)) as cloud:
        cloud.facts(5.0)
        assert api.is_calibrated(pairs.pair(0.3)[0], cloud) is knows


@pytest.mark.parametrize(("alias", "named"), [
    ("mine", "mine"), ("m.gguf", "/models/m.gguf"), ("unknown", "/models/m.gguf"), ("", "/models/m.gguf"),
])  # fmt: skip
def test_llama_server_is_named_by_its_alias_if_it_was_given_one(alias: str, named: str) -> None:
    answer = {"model_alias": alias, "model_path": "/models/m.gguf", "default_generation_settings": {"n_ctx": 64}}
    wire: Any = SimpleNamespace(ask=AsyncMock(return_value=answer))
    for wanted in (None, "m.gguf"):
        assert asyncio.run(LlamaServer().describe(wire, wanted, 1.0)) == {named: About(64, "/models/m.gguf")}
    assert asyncio.run(LlamaServer().describe(wire, "gguf", 1.0)) == {}


# --- Another model

OTHER = letters("toy:drift=0.9")
ALONE = write(OTHER, "cloud").run().token_ids


@pytest.mark.parametrize("plan", ["cloud", "gated"])
@pytest.mark.parametrize(
    ("dialect", "engine", "name", "error"),
    [("llama-server", OTHER, "toy", TargetChanged)]  # another file under the same name
    + [(each, OTHER, "another", TargetChanged) for each in IDS]
    + [(each, thinking_toy(), "toy", VocabularyMismatch) for each in IDS],
)
def test_another_model_is_told(dialect: str, engine: Engine, name: str, error: type[SkydraftError], plan: str) -> None:
    """Another model of an idle server is an error, and then the target."""
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        assert cloud.facts(None)
        for now, called in ((TARGET, "toy"), (engine, name)):  # the same model is no other
            assert len(write(cloud, plan).run().token_ids) == LENGTH
            server.kill()
            server.become(now, called)
            server.start()
        text = write(cloud, plan)
        with pytest.raises(error):
            text.run()
        assert text.rounds_so_far == ()
        if error is VocabularyMismatch:
            with pytest.raises(error):
                write(cloud, plan).run()
        else:
            assert (facts := cloud.facts(None)) and facts.name == name
            assert write(cloud, "cloud").run().token_ids == ALONE


@pytest.mark.stock
def test_two_llama_servers_behind_one_port_one_after_the_other(gguf_path: Path) -> None:
    port, params, plan, found = free_port(), DecodingParams(max_new_tokens=12), make_plan("cloud"), list[Any]()
    with (
        closing(skydraft.load(str(gguf_path), EngineOptions(num_threads=1, context_len=512))) as edge,
        closing(skydraft.connect(f"http://127.0.0.1:{port}", require=True)) as cloud,
    ):
        for model in (gguf_path, model_path(KNOWN[default_pair().target], cache_dir())):
            with llama_server(model, context=512, port=port):
                if found:
                    with pytest.raises(TargetChanged, match=r"runs .*1\.5b.* now; this text began with .*0\.5b"):
                        skydraft.generate("What is TCP?", edge=edge, cloud=cloud, plan=plan, params=params).run()
                done = skydraft.generate("What is TCP?", edge=edge, cloud=cloud, plan=plan, params=params).run()
                found.append((done.text, cloud.facts(None)))
    (first, facts), (second, now) = found
    assert first and second and first != second and facts.weights != now.weights and "1.5b" in now.name
