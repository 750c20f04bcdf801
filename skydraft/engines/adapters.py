"""The adapters of one model by name, each with its own engine on the same weights."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skydraft.characters import one_line
from skydraft.engines.adapter import AdapterCard, read_adapter
from skydraft.engines.vocab import TokenIds
from skydraft.errors import OptionError, RecordsError, SkydraftError, telling
from skydraft.files import ADAPTER, adapters_in

if TYPE_CHECKING:
    from skydraft.engines.base import Engine

AUTO, NONE = "auto", "none"


@dataclass(slots=True, eq=False)
class _Known:
    """An adapter's file as it was read, and its engine after a text has used it."""

    path: Path
    stamp: tuple[int, ...]  # the file's inode, times and size
    card: AdapterCard
    engine: Engine | None = None


class Adapters:
    """The adapters in `folder`, each at NAME/adapter.gguf. New or changed files apply from the next text.

    An engine is opened when a text first uses it. If its file changes or is removed, the engine is closed once no text
    uses it or can still wait for it. Any thread may use this.
    """

    def __init__(self, base: Engine) -> None:
        self.folder: Path | None = None
        self.default = AUTO  # for texts that name none
        self.wait_s = 300.0  # how long a text that has chosen one may wait for a sequence
        self._of = weakref.ref(base)  # the owner of this object
        self._known: dict[str, _Known] = {}
        self._replaced: dict[Engine, float] = {}  # old engines, and the time of their replacement
        self._lock = threading.Lock()

    @property
    def _base(self) -> Engine:
        base = self._of()
        assert base is not None  # the caller holds it
        return base

    @property
    def names(self) -> list[str]:
        return adapters_in(self.folder) if self.folder else []

    @property
    def usable(self) -> list[str]:
        """The names of intact adapters that were trained for these weights."""
        with self._lock:
            return [name for name in self.names if self._is_usable(name)]

    def choose(self, name: str | None, prompt: Seq[int] | TokenIds) -> Engine:
        """Return the engine for a text, with the adapter of that name or file; "none" is the plain model, None
        `default`.

        "auto" is the adapter whose prompts all begin like this one; among several the longest beginning wins. Raises
        OptionError or RecordsError for an adapter that was named.
        """
        wanted = self.default if name is None else name
        if wanted == NONE:
            return self._base
        with self._lock:
            self._close_replaced()
            known = self._fitting(prompt) if wanted == AUTO else self._named(wanted)
            try:
                return (known.engine or self._open(known)) if known else self._base
            except SkydraftError:
                if wanted != AUTO:
                    raise
                return self._base  # the error appears when the adapter is named

    def trained_on(self, chosen: Engine) -> frozenset[str]:
        """Return digests of the prompts that an engine's adapter was trained on; none for the plain model."""
        with self._lock:
            cards = [known.card for known in self._known.values() if known.engine is chosen]
            return frozenset(cards[0].trained_on if cards else ())

    def _fitting(self, prompt: Seq[int] | TokenIds) -> _Known | None:
        usable = [self._known[name] for name in self.names if self._is_usable(name)]
        found = [known for known in usable if known.card.begins(prompt)]
        return max(found, key=lambda known: known.card.beginning_len, default=None)

    def _is_usable(self, name: str) -> bool:
        with suppress(SkydraftError):  # the error appears when the adapter is named
            return self._read(name).card.base == self._base.fingerprint
        return False

    def _named(self, name: str) -> _Known:
        if not name.endswith(".gguf") and name not in self.names:
            says = f"{self._base.name} has no adapter '{one_line(name[:80])}'; it has: "
            raise OptionError(f"{says}{', '.join(self.names) or 'none'}.", hint="Make one with: skydraft learn run.")
        known = self._read(name)
        known.card.check_base(self._base.fingerprint, self._base.name)
        return known

    def _read(self, name: str) -> _Known:
        path = Path(name) if name.endswith(".gguf") else (self.folder or Path()) / name / ADAPTER
        with telling(RecordsError, f"{path} cannot be read", "Check its name."):
            stat = path.stat()
        stamp = stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size
        before = self._known.get(name)
        if before is None or before.stamp != stamp:
            self._known[name] = _Known(path, stamp, read_adapter(path).card)
            if before and before.engine:
                self._replace(before.engine)
        return self._known[name]

    def _replace(self, engine: Engine) -> None:
        self._replaced[engine] = time.monotonic()
        engine.forget_kept()

    def _open(self, known: _Known) -> Engine:
        name = known.path.parent.name if known.path.name == ADAPTER else known.path.stem
        known.engine = engine = self._base.open_adapted(known.path)
        engine.name, engine.adapter = f"{self._base.name}+{name}", name
        engine.is_local_only = self._base.is_local_only
        engine.prefixes.beginning = self._base.prefixes.beginning
        return engine

    def _close_replaced(self) -> None:
        for name, known in [*self._known.items()]:
            if known.engine and not known.path.exists():  # it was removed
                self._replace(known.engine)
                del self._known[name]
        for engine, since in [*self._replaced.items()]:
            if not engine.prefixes.num_open and time.monotonic() > since + self.wait_s:
                del self._replaced[engine]
                engine.close()

    def close(self) -> None:
        with self._lock:
            engines = [*self._replaced, *(known.engine for known in self._known.values() if known.engine)]
            self._known, self._replaced = {}, {}
        for engine in engines:
            engine.close()
