"""`skydraft doctor`: one verdict; what is wrong is a line, and exit status 1."""

import re
from pathlib import Path

import pytest

from ..serving import Serving
from ..stock.fakes import GENERATING, fake
from ..stock.faults import refuses
from .conftest import SMALL, Invoke
from .test_servers import EDGE, NOBODY


def test_a_pair_that_is_here_and_fits_is_ready(invoke: Invoke) -> None:
    status, out, err = invoke("doctor", *EDGE, "--cloud-model", "toy")
    assert "vocabulary   the same on both sides" in out and f"{SMALL}      491 MB  not here" in out, err
    assert status == 0 and out.endswith("Ready: toy checks drafts of toy:drift=0.2.\n")
    assert invoke("doctor", "--edge-model", "none", "--cloud-model", "toy")[0] == 0  # copies are drafts, too


@pytest.mark.parametrize("kind", ["skydraft", "vllm", "llama-server", "openai"])
def test_a_server_is_described_and_asked_to_write_nothing(invoke: Invoke, server: Serving, kind: str) -> None:
    with fake("vllm" if kind == "skydraft" else kind) as stock:
        address, what = (server.address, "skydraft ") if kind == "skydraft" else (stock.url, kind)
        status, out, err = invoke("doctor", "--cloud", address, *EDGE)
        assert not any(asked.path in GENERATING for asked in stock.model.asked)  # which may want money
    assert re.search(rf"^server +{re.escape(address)}, {'chat' if kind == 'openai' else what}.*, plaintext", out, re.M)
    assert re.search(r"^model +toy", out, re.M) and re.search(r"a round trip takes \d+\.\d ms$", out, re.M), err
    does = "checks drafts of toy:drift=0.2" if kind == "skydraft" else "streams"
    assert status == 0 and out.endswith(f"Ready: {address} {does}.\n")


def test_each_thing_to_do_is_a_line(invoke: Invoke, server: Serving, guarded: tuple[str, str], foreign: str) -> None:
    (damaged := Path(guarded[1]).with_name("damaged.gguf")).write_bytes(b"GGUFxxxx")
    edge, ours = " ".join(EDGE), server.address
    with fake("vllm") as vllm, fake("vllm") as refusing:
        refusing.fault_of = lambda path: refuses(401, '{"error": "Unauthorized"}')
        to_do = {
            f"--edge-model {damaged} --cloud-model toy": "the draft model does not load: ",
            f"{edge} --cloud-model {damaged}": "the target model does not load: ",
            f"{edge} --cloud-model {damaged.parent}/missing.gguf": "There is no file",
            f"{edge} --cloud {guarded[0]}": "token",
            f"{edge} --cloud {foreign}": "other tokens",
            **{f"{edge} --cloud {address}": "no connection" for address in NOBODY},
            f"{edge} --cloud {vllm.url} --drafts 127.0.0.2": "no drafts are taken at 127.0.0.2:7374",
            f"--edge-model none --cloud {vllm.url}": "gives no vocabulary, which a device without a model needs",
            f"{edge} --cloud {refusing.url}": "answered 401: Unauthorized. Give its key",
            f"{edge} --cloud http://{ours}": "the address of skydraft serve has no http://",
            f"{edge} --cloud {ours},127.0.0.1:9": "127.0.0.1:9 cannot be used",
            f"--cloud {ours}": f"{SMALL} is not on this machine",  # it is asked who it is, without a draft model
        }  # fmt: skip
        for words, says in to_do.items():
            status, out, _ = invoke("doctor", *words.split())
            line = " ".join(out.split())
            assert (status, line.count("To do: ")) == (1, 1) and says in line and "Ready" not in line, out
            assert out.count("round trip") == 1 or f"--cloud {ours}" not in words
    assert invoke("doctor", "--cloud", guarded[0], "--cloud-token-file", guarded[1], *EDGE)[0] == 0


def test_a_model_without_room_is_not_opened(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "large.gguf").write_bytes(b"GGUFxxxx")
    monkeypatch.setattr("skydraft.cli.doctor.free_bytes", lambda: 4)
    for side, asks in (("draft", ["--edge-model", path]), ("target", [*EDGE, "--cloud-model", path])):
        out = invoke("doctor", *map(str, asks))[1]
        assert f"To do: the {side} model needs 0.0 GB of memory, and 0.0 GB are free" in out
