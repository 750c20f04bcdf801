"""What leaves this device: with --local-only not one byte, by the counters of the only network device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import make_plan
from skydraft.decoding.traced import TraceObserver
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

from .cli.conftest import invoke, refused  # noqa: F401  (fixtures)
from .leaving import watched
from .serving import free_port, serving

_CAN_WATCH = os.name == "posix" and not watched("true").returncode


def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, num: int = 0) -> Any:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    done = watched(sys.executable, "-m", "tests.leaving", what, str(num))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not _CAN_WATCH, reason="no network namespaces here")
def test_no_byte_leaves_in_a_thousand_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kinds, at a gateway whose cloud is elsewhere; one without local_only sends some."""
    said = left(tmp_path, monkeypatch, "requests", 900)
    num_answers, num_refusals, control = said["done"]
    assert num_answers + num_refusals == 900 and num_answers > 600 and num_refusals > 60
    assert control > 0


@pytest.mark.skipif(not _CAN_WATCH, reason="no network namespaces here")
@pytest.mark.parametrize("what", ["commands", pytest.param("speech", marks=pytest.mark.long)])
def test_no_byte_leaves_from_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    said = left(tmp_path, monkeypatch, what)
    assert said["done"] > 100 and said["left"] == 0
    assert said["control"] > 0


def test_a_local_model_takes_no_server() -> None:
    cloud = skydraft.connect(f"127.0.0.1:{free_port()}")
    edge = skydraft.load("toy", local_only=True)
    with pytest.raises(OptionError, match="must stay on this device"):
        skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("quality"))
    with pytest.raises(OptionError, match="must stay on this device"):
        skydraft.generate("快", edge=open_toy("toy"), cloud=cloud, plan=make_plan("cloud"), local_only=True)
    assert skydraft.generate("快", edge=edge, cloud=open_toy("toy")).run().text
    alone = skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("edge")).run()
    assert set(alone.origins) == {"edge"} and alone.target is None
    cloud.close()


def test_a_local_text_has_no_trace() -> None:
    class Sender:
        def begin(self, *_: Any) -> Any:
            raise AssertionError("a span was begun")

    request = skydraft.generate("快", edge=open_toy("toy"), plan=make_plan("edge"), local_only=True).request
    observer = TraceObserver(Sender())  # type: ignore[arg-type]
    observer.ended(observer.begins(request), None, None)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cloud", "a:7373"], "--cloud"),
        (["--otlp", "http://localhost:4318"], "--otlp"),
        (["--edge-model", "a/b"], "a/b"),
    ],
)
def test_what_would_leave_is_refused_with_a_line(refused: Any, args: list[str], says: str) -> None:  # noqa: F811
    refused("generate", "快", "--local-only", *args, says=says, status=1 if args[-1] == "a/b" else 2)


def test_generate_prints_a_receipt(invoke: Any) -> None:  # noqa: F811
    with serving(open_toy("toy")) as server:
        generate = ["generate", "语速", "--edge-model", "toy:drift=0.2", "--json", "-n", "12"]
        _, out, _ = invoke(*generate, "-m", "lossless", "--cloud", server.address)
        said = json.loads(out)
        assert said["receipt"]["prompt_tokens"] == said["prompt_tokens"]
        assert said["receipt"]["seen"] == [{"tokens": [0, 12], "chars": [0, len(said["text"])]}]
        alone = json.loads(invoke(*generate, "-m", "edge")[1])["receipt"]
        assert (alone["prompt_tokens"], alone["seen"], alone["bytes_up"]) == (0, [], 0)
