"""A list of servers, with skydraft or without: the order of tries, lost servers, their targets and facts."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from skydraft.decoding.target import TargetFacts
from skydraft.edge.channel import seen, shared_loop
from skydraft.edge.server import Server
from skydraft.errors import CloudError, SkydraftError, TargetChanged
from skydraft.protocol.values import TargetId

T = TypeVar("T")
_AVOID_S = 5.0  # a lost server is tried last for this long
_CLOSE_S = 1.0  # timeout for closing sessions


def of_each(faults: Mapping[str, SkydraftError]) -> SkydraftError:
    """Choose the fault to report: the first that waiting cannot cure, else the last. `faults` are by address."""
    *_, last = faults.values()
    return next((each for each in faults.values() if not getattr(each, "is_outage", False)), last)


class Servers:
    """A list of servers that run the same model. All generations with this list share it."""

    def __init__(self, servers: Seq[Server]) -> None:
        self.all = tuple(servers)
        self.name = ",".join(server.address for server in servers)
        self.has_others = len(servers) > 1
        self.target: TargetId | None = None  # with several servers: the first target seen, which all must run
        self.facts: dict[str, tuple[float, TargetFacts]] = {}  # (time, facts) by address
        self._ran: dict[str, TargetId] = {}  # the last target seen, by address
        self._avoid_until: dict[str, float] = {}
        self._gone: tuple[float, CloudError | None] = 0.0, None  # when no server answered, and why
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_reached(self) -> bool:
        return any(server.heard_at for server in self.all)

    def in_order(self, key: float) -> list[Server]:
        """Return the servers in the order of tries for a text with this random key. The keys spread the texts evenly;
        recently lost servers come last."""
        now = time.monotonic()

        def place(server: Server) -> tuple[bool, float]:
            return self._avoid_until.get(server.address, 0.0) > now, random.Random(f"{key} {server.address}").random()

        return sorted(self.all, key=place)

    @property
    def outage(self) -> CloudError | None:
        """Why a text went on without the servers; None once any server has answered."""
        at, error = self._gone
        return None if any(server.heard_at > at for server in self.all) else error

    def gone(self, error: CloudError) -> None:
        self._gone = shared_loop().now(), error

    def lost(self, server: Server) -> None:
        """Try a server last for a while: it did not answer, or runs another target."""
        self._avoid_until[server.address] = time.monotonic() + _AVOID_S

    def met(self, server: Server, target: TargetId | None) -> None:
        """Note a server's target. With several servers the first one noted becomes the target of all."""
        if target and target != (before := self._ran.get(server.address)):
            self._ran[server.address] = target
            if before:
                self.facts.pop(server.address, None)  # facts about the target before
        if self.has_others and self.target is None:
            self.target = target

    def have_changed(self, faults: Mapping[str, SkydraftError]) -> bool:
        """Return whether all servers now run another target. If so, forget the old one, so that texts can start."""
        changed = [address for address, each in faults.items() if isinstance(each, TargetChanged)]
        self.facts = {address: each for address, each in self.facts.items() if address not in changed}
        if len(changed) < len(self.all) or self.target is None:
            return False
        self.target = None
        return True

    def agree(self, server: Server) -> None:
        """Note the target that a server reports. Raises TargetChanged if the others run another one."""
        if server.runs and self.target and not server.runs.will_do_for(self.target):
            message = f"The server {server.address} runs another model or execution than others of the list."
            raise TargetChanged(message, hint="Name servers that run the same model with the same --execution.")
        self.met(server, server.runs)

    async def ask(self, key: float, ask: Callable[[Server], Awaitable[T]]) -> T:
        """Return the answer of the first server that gives one. Raises the error that `of_each` chooses."""
        faults = dict[str, SkydraftError]()
        for server in self.in_order(key):
            try:
                return await ask(server)
            except SkydraftError as error:
                faults[server.address] = error
                self.lost(server)
        if self.have_changed(faults):
            return await self.ask(key, ask)
        raise of_each(faults)

    async def learn(self, server: Server, timeout_s: float) -> TargetFacts:
        facts = await server.learn(timeout_s)
        self.agree(server)
        self.facts[server.address] = time.monotonic(), facts
        return facts

    async def renew(self) -> None:
        for server in self.all:
            await server.renew()

    def end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run closing work on the loop. Never waits."""

        def begin() -> None:
            task = asyncio.ensure_future(work())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.add_done_callback(seen)  # on failure the session expires on the server

        shared_loop().post(begin)

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_S)
        for server in self.all:
            await server.close()
