"""Where a server without skydraft is, and how it is spoken to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from skydraft.characters import one_line
from skydraft.edge.tls import check_certificates, check_token
from skydraft.errors import OptionError
from skydraft.protocol.address import is_loopback, without_password

APIS = ("vllm", "sglang", "llama-server", "completions", "chat")


@dataclass(frozen=True, slots=True)
class StockOptions:
    """Address and credentials of a server without skydraft. `api` is one of APIS, or "auto": it says so itself; `model`
    is one of several models there."""

    url: str
    api: str = "auto"
    model: str | None = None
    key: str | None = None
    tls_ca: bytes | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # raises for one that is none
        except ValueError as error:
            raise self._no_address() from error
        rest = (parts.username, parts.query, parts.fragment, "," in parts.netloc, "?" in self.url, "#" in self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or any(rest):
            raise self._no_address()
        if self.api not in ("auto", *APIS):
            raise OptionError(f"--cloud-api {self.api} is unknown.", hint=f"Choose one of: auto, {', '.join(APIS)}.")
        if self.tls_ca and not self.uses_tls:
            raise OptionError("--tls-ca does not apply to http://, which is not encrypted.")
        if self.tls_ca:
            check_certificates(self.tls_ca)
        check_token(self.key)
        if self.key and not (self.uses_tls or self.is_here or self.insecure):
            raise OptionError(
                "The key would cross the network unencrypted.", hint="Use https://, or allow that with --insecure."
            )

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def address(self) -> str:
        """The URL without a slash at its end."""
        return f"{self._parts.scheme}://{self.host}{self._parts.path.rstrip('/')}"

    @property
    def host(self) -> str:
        """The host and its port."""
        return self._parts.netloc

    @property
    def uses_tls(self) -> bool:
        return self._parts.scheme == "https"

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine."""
        return is_loopback(self._parts.hostname or "")

    @property
    def roots(self) -> tuple[str, str]:
        """Where the server's own interface begins, and where that of OpenAI's kind does; without a slash at the end.

        An address that ends in a version, such as /api/v3, is the latter as it stands, and so is any path of a server
        of text.
        """
        url, path = self.address, self._parts.path.rstrip("/")
        if re.search(r"/v\d+\w*$", path):
            return url.rpartition("/")[0], url
        return url, url if path and self.api in ("completions", "chat") else f"{url}/v1"

    def _no_address(self) -> OptionError:
        hint = "Write one address, for example http://HOST:PORT/v1."
        return OptionError(
            f"'{one_line(without_password(self.url))}' is not the address of a server.",
            hint="Give a key with --cloud-key-file FILE, not in the address." if "@" in self.url else hint,
        )
