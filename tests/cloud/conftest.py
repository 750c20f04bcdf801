"""What tests of servers share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from skydraft.engines.toy import open_toy

from ..serving import RawSession, Serving, serving
from .driver import TOKENS


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(open_toy("toy"), max_prompt=50) as running:
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "tokens").write_text(f"# who\n{TOKENS}")
    return tmp_path / "tokens"


@pytest.fixture
def new(server: Serving) -> Iterator[Callable[[], RawSession]]:
    """Opens streams, all over one connection."""
    with grpc.insecure_channel(server.address) as channel:
        yield lambda: RawSession(channel)
