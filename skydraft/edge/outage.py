"""Whether the cloud is gone, and whether it is back: asked by a thread of its own while the edge goes on alone."""

from __future__ import annotations

import threading
import time

from skydraft.edge.fleet import Links, Notify
from skydraft.errors import CloudError, SkydraftError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PROBE_S = 3.0


class Outage:
    """The state of the cloud as the fallback sees it: `error` is what ended it, for as long as the cloud is gone.

    `notify` gets one line when the cloud goes and when it is back.
    """

    def __init__(self, links: Links, notify: Notify) -> None:
        self._links = links
        self._notify = notify
        self.error: CloudError | None = None
        self._began = 0.0
        self._closed = threading.Event()
        self._pause_s = _FIRST_PAUSE_S  # grows over all outages of a generation: a cloud that flaps is asked less

    def begin(self, error: CloudError, *, final: bool = False) -> None:
        """The cloud is gone: say so, and look for it until it is back, unless that would not help."""
        self.error = error
        self._began = time.monotonic()
        self._notify(f"The cloud at {self._links.name} is gone ({str(error).rstrip('.')}); going on alone.")
        if not final:
            threading.Thread(target=self._probe, name="probe", daemon=True).start()

    def _probe(self) -> None:
        while not self._closed.wait(self._pause_s):
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            try:
                self._links.look(_PROBE_S)
            except SkydraftError:
                continue
            if not self._closed.is_set():
                self._notify(f"The cloud is back after {time.monotonic() - self._began:.1f} s.")
            self.error = None
            return

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
