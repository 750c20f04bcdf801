"""What leaves this device: with --local-only not one byte, by the counters of the only network device."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

import skydraft
from skydraft import make_plan
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

from .leaving import watched
from .serving import free_port

_CAN_WATCH = os.name == "posix" and not watched("true").returncode


@pytest.mark.skipif(not _CAN_WATCH, reason="no network namespaces here")
@pytest.mark.parametrize("what", ["requests", "commands"])
def test_no_byte_leaves(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In hundreds of requests of all kinds at a gateway whose cloud is elsewhere, and from commands."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    done = watched(sys.executable, "-m", "tests.leaving", what, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["left"] == 0 and said["control"] > 0  # what may leave does
    assert said.get("answers", 201) > 200 and said.get("refusals", 21) > 20


def test_a_local_model_takes_no_server() -> None:
    with closing(skydraft.connect(f"127.0.0.1:{free_port()}")) as cloud:
        edge = skydraft.load("toy", local_only=True)
        with pytest.raises(OptionError, match="must stay on this device"):
            skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("lossless"))
        with pytest.raises(OptionError, match="must stay on this device"):
            skydraft.generate("快", edge=open_toy("toy"), cloud=cloud, plan=make_plan("cloud"), local_only=True)
        assert skydraft.generate("快", edge=edge, cloud=open_toy("toy")).run().text
        alone = skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("edge")).run()
        assert set(alone.origins) == {"edge"} and alone.target is None
