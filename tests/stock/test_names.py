"""What is learned at a server without skydraft belongs to the model that this server names."""

import asyncio
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import skydraft
from skydraft import api
from skydraft.edge.stock.dialect import About
from skydraft.edge.stock.ids import LlamaServer
from skydraft.errors import OptionError
from skydraft.lab.learning.calibrating import write_calibration
from skydraft.lab.learning.collect import Collector
from skydraft.lab.learning.dataset import weights_of
from skydraft.lab.learning.lessons import Lesson, Store
from tests.cli.conftest import Invoke, invoke  # noqa: F401
from tests.evaluation import pairs
from tests.hostile.texts import TARGET, write
from tests.stock.fakes import Fake, fake


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def collect(server: Fake, folder: Path) -> list[str]:
    """Write a text at a server and keep what it teaches; returns what was said about it."""
    said: list[str] = []
    collector = Collector(folder, notify=said.append)
    with closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        cloud.facts(5.0)
        collector.keep(write(cloud, "cloud").run())
    collector.close()
    return said


def lessons(folder: Path) -> list[Lesson]:
    return list(Store(folder).lessons(Counter()))


def test_lessons_of_two_models_do_not_mix(tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    with fake("vllm", TARGET) as server:
        for name in ("org/toy", "org/My-Toyota-7B", "org/" + "x" * 900):
            server.become(TARGET, name)
            assert collect(server, tmp_path / "learn") == []
    kept = [lesson.target for lesson in lessons(tmp_path / "learn")]
    assert kept == ["name:org/toy", "name:org/My-Toyota-7B", "name:org/" + "x" * 900]
    _, out, _ = invoke("learn", "status", str(tmp_path / "learn"))
    assert "target org/toy)" in out and "target org/My-Toyota-7B)" in out


def test_of_a_model_without_a_name_nothing_is_kept(tmp_path: Path) -> None:
    with fake("llama-server", TARGET) as server:
        server.become(TARGET, "bad\x1bname")
        said, _ = collect(server, tmp_path / "learn")  # the reason, and at the end how many
        assert "does not tell which model" in said and lessons(tmp_path / "learn") == []
        with closing(skydraft.connect(server.url)) as cloud, pytest.raises(OptionError, match="which model"):
            weights_of(cloud)


@pytest.mark.parametrize(("target", "knows"), [("toy", True), ("Toyota", False), ("oy", False)])
def test_a_calibration_fits_the_whole_name_alone(target: str, knows: bool, home: Path) -> None:
    calibration = pairs.calibration(0.3)
    named = calibration.model_copy(update={"target": calibration.target.model_copy(update={"name": target})})
    write_calibration(named, home)
    edge, _ = pairs.pair(0.3)
    for name in ("toy", "My-Toyota-7B"):
        with fake("vllm", TARGET) as server:
            server.become(TARGET, name)
            with closing(skydraft.connect(f"{server.url}/v1")) as cloud:
                cloud.facts(5.0)
                assert api.is_calibrated(edge, cloud) is (knows and name == "toy")


@pytest.mark.parametrize(("alias", "named"), [
    ("mine", "mine"), ("m.gguf", "/models/m.gguf"), ("unknown", "/models/m.gguf"), ("", "/models/m.gguf"),
])  # fmt: skip
def test_llama_server_is_named_by_its_alias_if_it_was_given_one(alias: str, named: str) -> None:
    answer = {"model_alias": alias, "model_path": "/models/m.gguf", "default_generation_settings": {"n_ctx": 64}}

    wire: Any = SimpleNamespace(ask=AsyncMock(return_value=answer))
    for wanted in (None, "m.gguf"):
        assert asyncio.run(LlamaServer().describe(wire, wanted, 1.0)) == {named: About(64, "/models/m.gguf")}
    assert asyncio.run(LlamaServer().describe(wire, "gguf", 1.0)) == {}
