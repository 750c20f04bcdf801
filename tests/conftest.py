"""Settings of all tests. Garbage is collected after each file, so a warning about something left open names the file
that left it. Models are read from the user's cache; nothing is written there.

Test processes run side by side, so torch and numpy compute in one thread: threads that wait for each other on busy
cores take ten times as long.
"""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.models import cache_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before either is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started this in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
# imports torch, which takes seconds and half a gigabyte.
_TOGETHER: dict[str, tuple[str, ...]] = {
    "real_pair": ("tests/real_pair/",),
    "torch": (
        "tests/engines/test_omni", "tests/engines/test_transformers", "tests/engines/test_contract.py", "tests/speech/",
        "tests/learning/", "tests/recipes/", "tests/gateway/test_speech.py", "tests/test_bench.py",
        "tests/choosing/test_grammar.py",
    ),
}  # fmt: skip


def _group(nodeid: str) -> str:
    """What a test is scheduled with: its group, or its file."""
    path = nodeid.partition("::")[0]
    return next((name for name, starts in _TOGETHER.items() if path.startswith(starts)), path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups, which take longest, first."""
    items.sort(key=lambda item: _group(item.nodeid) not in _TOGETHER)


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
