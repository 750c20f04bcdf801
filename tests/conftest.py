"""Settings of all tests. Garbage is collected after each file, so a warning about something left open names the file
that left it. Models are read from the user's cache; nothing is written there.

Test processes run side by side, so torch and numpy compute in one thread: threads that wait for each other on busy
cores take ten times as long.

By itself `lossless` streams the target where drafting would be slower, as it is with toys. A law about drafting and
checking would then hold of itself: its module uses `fixed_k`, with which `lossless` drafts blocks of five.
"""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.config import MODES, ModeSpec
from skydraft.models import cache_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before either is imported


@pytest.fixture
def fixed_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lossless` drafts blocks of five tokens, however fast the target is."""
    monkeypatch.setitem(MODES, "lossless", ModeSpec("always", 5))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated runs wait three times as long as they do before they go on alone."""
    from tests.serving import unhurried

    monkeypatch.setattr("skydraft.edge.cloud.waiting_for", unhurried)
    monkeypatch.setattr("skydraft.edge.recovery.MOVE_S", 3.0)


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


# Groups of files that one process runs, before everything else: it opens and probes the demo pair once, and it alone
# imports torch, which takes seconds and half a gigabyte. The files that take longest come next.
_TOGETHER: dict[str, tuple[str, ...]] = {
    "real_pair": ("tests/real_pair/",),
    "torch": (
        "tests/engines/test_omni", "tests/engines/test_transformers", "tests/engines/test_contract.py", "tests/speech/",
        "tests/learning/", "tests/recipes/", "tests/gateway/test_speech.py", "tests/test_bench.py",
        "tests/choosing/test_grammar.py",
    ),
}  # fmt: skip
_LONGEST = (
    "tests/docs/test_commands.py", "tests/edge/test_failing_servers.py", "tests/gateway/test_desk.py",
    "tests/edge/test_remote.py", "tests/cli/test_compare.py", "tests/edge/test_unreliable.py",
)  # fmt: skip
_FIRST = (*_TOGETHER, *_LONGEST)


def _group(nodeid: str) -> str:
    """What a test is scheduled with: its group, or its file."""
    path = nodeid.partition("::")[0]
    return next((name for name, starts in _TOGETHER.items() if path.startswith(starts)), path)


# Files that use `fixed_k` throughout.
_FIXED_K = {
    "tests/cli/test_learn.py", "tests/cloud/test_grammars.py", "tests/cloud/test_operating.py",
    "tests/cloud/test_serving.py", "tests/decoding/test_conversations.py",
    "tests/decoding/test_laws.py", "tests/edge/test_lying_servers.py", "tests/edge/test_mending.py",
    "tests/edge/test_remote.py", "tests/edge/test_unreliable.py",
    "tests/gateway/test_desk.py", "tests/gateway/test_structured.py", "tests/speech/test_tiny_pair.py",
}  # fmt: skip


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.partition("::")[0] in _FIXED_K and isinstance(item, pytest.Function):
        item.fixturenames.insert(0, "fixed_k")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, and the files of a group one after the other."""
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(_group(item.nodeid), len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A group, or a file, is run by one process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """Modules stay to the end; a collection that looks through them takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """What `serve` or `gateway` says about logs in this process holds for one test."""
    loggers = [logging.getLogger(name) for name in ("skydraft", "grpc")]
    before = [(list(each.handlers), each.propagate, each.level) for each in loggers]
    yield
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
