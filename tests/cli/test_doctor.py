"""`skydraft doctor`: each part, one sentence on the link, one verdict; what is wrong is a line, and exit status 1."""

import re
import tomllib
from pathlib import Path

import pytest

from skydraft.cli.doctor import PURPOSES
from skydraft.engines.toy import open_toy

from ..serving import serving
from ..starting import ROOT
from ..stock.fakes import GENERATING, fake
from .conftest import Invoke
from .test_commands import SMALL

EDGE = ["--edge-model", "toy:drift=0.3"]
LINK = r"^link +a round trip takes \d+\.\d ms; a stream begins after \d+ ms and gives a token every \d+\.\d ms$"


def test_a_pair_that_is_here_and_fits_is_ready(invoke: Invoke) -> None:
    status, out, err = invoke("doctor", *EDGE, "--cloud-model", "toy")
    assert "vocabulary   the same on both sides" in out, err
    assert status == ("To do" in out) and (status or out.endswith("Ready: toy:drift=0.3 drafts, toy checks.\n"))


def test_doctor_knows_every_extra_and_how_to_get_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = page["project"]["optional-dependencies"]
    assert set(PURPOSES) == set(extras) - {"all", "conformance", "dev"}  # one names the others, two are ours
    here = {"torch": "2.9.0", "transformers": "5.20.0", "soundfile": "0.13"}

    monkeypatch.setattr("skydraft.cli.doctor.installed", here.get)
    status, out, _ = invoke("doctor", "--cloud-model", "toy")
    missing = f"To do: the draft model does not load: {SMALL} is not on this machine"
    assert status == 1 and missing in " ".join(out.split()) and f"skydraft models fetch {SMALL}" in out
    for line in (
        "  transformers installed: torch 2.9.0, transformers 5.20.0",
        "  audio        missing soxr; for reading recordings: pip install 'skydraft[audio]'",
        "To do: llama.cpp is missing, which runs GGUF models: pip install 'skydraft[prebuilt]'",
    ):
        assert line in out.splitlines()
    assert all(f"skydraft[{extra}]'" in out for extra in PURPOSES.keys() - {"transformers"})
    here["transformers"] = "6.1.0"
    status, out, _ = invoke("doctor", *EDGE, "--cloud-model", "toy")
    assert status == 1 and "To do: transformers 6.1.0 does not fit skydraft[omni]: pip install" in " ".join(out.split())
    assert "does not load" not in out


@pytest.mark.parametrize("content", [None, b"GGUFxxxx"], ids=["missing", "damaged"])
@pytest.mark.parametrize("side", ["edge", "cloud"])
def test_a_file_that_does_not_load_is_named(
    invoke: Invoke, tmp_path: Path, side: str, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.gguf"
    if content:
        path.write_bytes(content)
    name, asks = "draft" if side == "edge" else "target", ["doctor", f"--{side}-model", str(path)]
    asks += ["--cloud-model" if side == "edge" else "--edge-model", "toy"]
    status, out, _ = invoke(*asks)
    assert status == 1 and f"To do: the {name} model does not load: " in (line := " ".join(out.split()))
    assert ("its header cannot be read" if content else "There is no file") in line and "Ready" not in line
    if content:
        monkeypatch.setattr("skydraft.cli.doctor.free_bytes", lambda: 4)
        assert f"To do: the {name} model needs 0.0 GB of memory, and 0.0 GB are free" in invoke(*asks)[1]


@pytest.mark.parametrize("kind", ["own", "vllm", "llama-server", "openai", "vllm without a cache"])
def test_a_server_is_described_and_its_link_measured(invoke: Invoke, kind: str) -> None:
    """What it writes for that is all that it writes. One that tells of no cache has something to repair."""
    asked: list[str] = []
    if kind == "own":
        with serving(open_toy("toy")) as server:
            address, what = server.address, "skydraft "
            status, out, err = invoke("doctor", "--cloud", address, *EDGE)
    else:
        with fake(kind.split()[0], block_len=4096 if "without" in kind else 1) as stock:
            stock.fault_of, address = asked.append, stock.url  # type: ignore[assignment]
            what = {"openai": "chat"}.get(kind, kind.split()[0])
            status, out, err = invoke("doctor", "--cloud", address, *EDGE)
    assert re.search(rf"^server +{re.escape(address)}, {what}.*, plaintext", out, re.M), err
    assert re.search(r"^model +toy", out, re.M) and re.search(LINK, out, re.M)
    assert sum(path in GENERATING for path in asked) in (0, 2)
    told = kind != "vllm without a cache"
    assert status == (not told) and (f"Ready: toy:drift=0.3 drafts, {address} checks." in out) == told
    assert ("turn on the server's prefix cache" in out) != told


def test_a_server_is_asked_who_it_is_where_the_draft_model_is_not_here(invoke: Invoke) -> None:
    with serving(open_toy("toy")) as server:
        status, out, _ = invoke("doctor", "--cloud", server.address)
    assert re.search(r"^model +toy", out, re.M) and re.search(r"a round trip takes \d+\.\d ms$", out, re.M)
    assert status == 1 and out.count("To do") == 1 and f"{SMALL} is not on this machine" in " ".join(out.split())
