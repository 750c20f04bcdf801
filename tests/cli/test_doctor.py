"""`skydraft doctor`: one verdict; what is wrong is a line, and exit status 1."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..serving import Serving
from ..stock.fakes import GENERATING, fake
from .conftest import Invoke
from .test_cloud import NOBODY, foreign, guarded, server  # noqa: F401
from .test_commands import SMALL

EDGE = ["--edge-model", "toy:drift=0.3"]


def test_a_pair_that_is_here_and_fits_is_ready(invoke: Invoke) -> None:
    status, out, err = invoke("doctor", *EDGE, "--cloud-model", "toy")
    assert "vocabulary   the same on both sides" in out and f"{SMALL}      491 MB  not here" in out, err
    assert status == 0 and out.endswith("Ready: toy:drift=0.3 drafts, toy checks.\n")


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


def test_each_server_is_described(invoke: Invoke, server: Serving) -> None:  # noqa: F811
    with ExitStack() as stack:
        others = {kind: stack.enter_context(fake(kind)).url for kind in ("vllm", "llama-server", "openai")}
        for kind, address in ({"ours": server.address} | others).items():
            status, out, err = invoke("doctor", "--cloud", address, *EDGE)
            what = {"ours": "skydraft ", "openai": "chat"}.get(kind, kind)
            assert re.search(rf"^server +{re.escape(address)}, {what}.*, plaintext", out, re.M), err
            assert re.search(r"^model +toy", out, re.M) and re.search(r"a round trip takes \d+\.\d ms$", out, re.M)
            assert status == 0 and out.endswith(f"Ready: toy:drift=0.3 drafts, {address} checks.\n")
        status, out, _ = invoke("doctor", "--cloud", others["vllm"], "--drafts", "127.0.0.1:9", *EDGE)
        assert status == 1 and "no drafts are taken at 127.0.0.1:9" in " ".join(out.split())
    both = f"{server.address},127.0.0.1:9"
    status, out, _ = invoke("doctor", "--cloud", both, *EDGE)
    assert status == 1 and out.count("round trip") == 1 and "127.0.0.1:9 cannot be used" in out.replace("\n", " ")
    status, out, _ = invoke("doctor", "--cloud", server.address)  # asked who it is, without a draft model
    assert status == 1 and out.count("round trip") == out.count("To do") == 1
    assert f"{SMALL} is not on this machine" in " ".join(out.split())


def test_what_is_wrong_with_a_server_is_a_line(
    invoke: Invoke, guarded: tuple[str, str], foreign: str  # noqa: F811
) -> None:  # fmt: skip
    address, tokens = guarded
    for cloud, says in ((address, "token"), (foreign, "other tokens"), *((each, "no connection") for each in NOBODY)):
        status, out, _ = invoke("doctor", *EDGE, "--cloud", cloud)
        assert status == 1 and says in " ".join(out.split()), out
    assert invoke("doctor", "--cloud", address, "--cloud-token-file", tokens, *EDGE)[0] == 0


def test_a_server_that_may_want_money_writes_nothing(invoke: Invoke) -> None:
    asked: list[str] = []
    with fake("openai") as stock:
        stock.fault_of = asked.append  # type: ignore[assignment]
        assert invoke("doctor", "--cloud", stock.url, *EDGE)[0] == 0
    assert asked and not any(path in GENERATING for path in asked)
