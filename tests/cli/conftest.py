"""What tests of commands share: the command line in this process, what it printed, and servers to reach."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skydraft.cli.main import run
from skydraft.engines.toy import open_toy

from ..serving import Serving, serving

SMALL = "qwen2.5-coder-0.5b"
TOYS = ["--edge-model", "toy:drift=0.4", "--cloud-model", "toy"]
Invoke = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))

    def call(*args: str) -> tuple[int, str, str]:
        status = run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(invoke: Invoke) -> Refused:
    """Run a command that must print one line on stderr, which says this, and nothing on stdout."""

    def call(*args: str, says: str, status: int = 2) -> None:
        found, out, err = invoke(*args)
        assert (found, out) == (status, ""), err
        assert says in err and err.startswith("skydraft: ") and err.count("\n") == 1 and err.strip().isprintable()

    return call


@pytest.fixture(scope="package")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server that wants a token, and a file with one."""
    token_file = tmp_path_factory.mktemp("guarded") / "tokens"
    token_file.write_text("phone a-token-of-24-characters\n")
    with serving(open_toy("toy"), token_file=token_file) as running:
        yield running.address, str(token_file)


@pytest.fixture(scope="package")
def foreign() -> Iterator[str]:
    """The address of a server with another vocabulary."""
    other = open_toy("toy")
    other.vocab = type(other.vocab)([b"a", b"<eos>"], lambda text: [0], special_ids=[1], end_ids=[1])
    with serving(other) as running:
        yield running.address
