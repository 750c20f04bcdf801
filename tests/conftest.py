"""What holds for all tests. Garbage is collected after each file, so that what its tests left open is said of them and
not of others. Models come from the user's cache, where nothing is written.

In tests `lossless` drafts blocks of five: by itself it lets the target go alone where that is faster, which with toys
it is, and the laws about it would hold of themselves. `as_shipped` gives a test the mode as users have it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.config import MODES, ModeSpec
from skydraft.models import cache_dir

_SHIPPED = MODES["lossless"]
MODES["lossless"] = ModeSpec("always", 5)


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes as users have them."""
    monkeypatch.setitem(MODES, "lossless", _SHIPPED)


@pytest.fixture(scope="session", autouse=True)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for tests alone, with links to the user's models. pytest keeps it for the next run, since
    probing the demo pair takes a minute or two."""
    kept: pytest.Cache | None = getattr(request.config, "cache", None)
    home = kept.mkdir("home") if kept else tmp_path_factory.mktemp("home")
    link_models(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYDRAFT_HOME", str(home))
        yield home


def link_models(home: Path) -> None:
    """Let `home` have the models of the cache folder."""
    ours = home / "models"
    ours.mkdir(exist_ok=True, parents=True)
    for link in ours.glob("*.gguf"):
        if not link.exists():
            link.unlink(missing_ok=True)
    for path in (cache_dir() / "models").glob("*.gguf"):
        with suppress(FileExistsError):
            (ours / path.name).symlink_to(path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the real pair first: they take longest."""
    items.sort(key=lambda item: "real_pair" not in item.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is run by one process, and those of the real pair by the same, which opens and probes it once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/real_pair" if file.startswith("tests/real_pair/") else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """What stays to the end is not looked at again by the garbage collector, which would take a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
