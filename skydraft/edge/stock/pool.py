"""The HTTP connections to one server without skydraft. All runs on the event loop."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from skydraft.errors import OptionError

if TYPE_CHECKING:
    import httpx2

_CONNECT_S = 10.0
_IDLE_S, _IDLE_TLS_S = 4.0, 60.0  # an unused connection is kept for this long; llama-server keeps it for 5 s


class Pool:
    """The connections, shared by all generations. `heard_at`: the time of the server's last answer, by the loop's
    clock."""

    def __init__(self, url: str, key: str | None, tls_ca: bytes | None, *, is_here: bool) -> None:
        self.heard_at = 0.0
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "skydraft"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._is_plain = url.startswith("http:")
        self._tls_ca = tls_ca
        self._is_here = is_here
        self._client: httpx2.AsyncClient | None = None
        self._lent: Counter[httpx2.AsyncClient] = Counter()  # requests under way

    @property
    def client(self) -> httpx2.AsyncClient:
        """The client that makes connections, made at the first use. Raises OptionError."""
        if self._client is None:
            import httpx2

            trusted: ssl.SSLContext | bool = not self._is_plain  # roots take 35 ms to read
            if self._tls_ca:
                trusted = ssl.create_default_context(cadata=self._tls_ca.decode("ascii"))
            try:
                self._client = httpx2.AsyncClient(
                    verify=trusted, headers=self._headers, follow_redirects=False,
                    trust_env=not self._is_here,  # a proxy does not lead back to this machine
                    timeout=httpx2.Timeout(None, connect=_CONNECT_S),  # `patiently` watches the rest
                    limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_TLS_S if trusted else _IDLE_S),
                )  # fmt: skip
            except ImportError as error:
                raise OptionError("ALL_PROXY names a SOCKS proxy.", hint="Run: pip install socksio") from error
        return self._client

    @asynccontextmanager
    async def lending(self) -> AsyncIterator[httpx2.AsyncClient]:
        """The client for one request. Its connections live as long as it carries one."""
        client = self.client
        self._lent[client] += 1
        try:
            yield client
        finally:
            self._lent[client] -= 1
            if not self._lent[client]:
                del self._lent[client]
                if client is not self._client:
                    await _closed(client)

    async def renew(self) -> None:
        """Make new connections from now on. Requests under way keep theirs."""
        client, self._client = self._client, None
        if client is not None and client not in self._lent:
            await _closed(client)

    async def close(self) -> None:
        """Drop all connections; the next request makes new ones."""
        clients = {*self._lent, *([self._client] if self._client else [])}
        self._client = None
        for client in clients:
            await _closed(client)


async def _closed(client: httpx2.AsyncClient) -> None:
    with suppress(Exception):
        await client.aclose()
