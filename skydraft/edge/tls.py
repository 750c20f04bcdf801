"""A server's address and credentials, and whether its connection is encrypted."""

import re
import ssl
from dataclasses import dataclass

from skydraft.errors import CloudLost, OptionError, SkydraftError, WrongServer
from skydraft.protocol.address import is_loopback, parse_address


def trusting(tls_ca: bytes | None) -> ssl.SSLContext:
    """Return a client context that trusts `tls_ca` (PEM) or the system's roots. Raises ValueError, SSLError."""
    return ssl.create_default_context(cadata=tls_ca.decode("ascii") if tls_ca else None)


def check_credentials(token: str | None, tls_ca: bytes | None) -> None:
    """Raise OptionError for a token that no header can carry, or an invalid certificate. Never shows the token."""
    if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
        hint = "Check the token's file."
        raise OptionError("The token is empty or has a character that no HTTP header can carry.", hint=hint)
    try:
        if tls_ca:
            trusting(tls_ca)
    except (ssl.SSLError, ValueError) as error:
        raise OptionError("--tls-ca is not a certificate in PEM form.", hint="Give the CA's file.") from error


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address and credentials for a server.

    Connections use TLS, except to loopback or with `insecure`. `tls_ca` (PEM) replaces the system's roots. `tls_name`
    is the name in the certificate if it is not the host's. Either of the two turns TLS on.
    """

    address: str
    token: str | None = None
    tls_ca: bytes | None = None
    tls_name: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        parse_address(self.address)
        check_credentials(self.token, self.tls_ca)
        if not re.fullmatch(r"[\w.:*-]{0,253}", self.tls_name or ""):
            raise OptionError(f"--tls-name {self.tls_name} is not a host name.", hint="Copy it from the certificate.")

    @property
    def target(self) -> str:
        return ":".join(map(str, parse_address(self.address)))

    @property
    def uses_tls(self) -> bool:
        return bool(self.tls_ca or self.tls_name) or not (self.insecure or self.is_here)

    @property
    def is_here(self) -> bool:
        return is_loopback(parse_address(self.address)[0])


def first_error(error: SkydraftError, options: ServerOptions) -> SkydraftError:
    """Return a clearer error for a first connection that fails because the server expects HTTP or TLS."""
    says = error.message if isinstance(error, CloudLost) else ""
    if "Failed parsing HTTP/2" in says:
        hint = f"If it is a server without skydraft, its address is http://{options.address}."
        return WrongServer(f"The server at {options.target} does not speak skydraft's protocol.", hint=hint)
    if "Socket closed" in says and not options.uses_tls:
        return CloudLost(f"{says} If it wants TLS, give --tls-ca.")
    return error
