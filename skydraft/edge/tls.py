"""Where a server is, and whether the connection to it is encrypted."""

import re
import ssl
from dataclasses import dataclass

from skydraft.errors import CloudLost, OptionError, SkydraftError, WrongServer
from skydraft.protocol.address import is_loopback, parse_address


def trusting(tls_ca: bytes | None) -> ssl.SSLContext:
    """What a client trusts: these certificates (PEM), or without any the system's. Raises ValueError, SSLError."""
    return ssl.create_default_context(cadata=tls_ca.decode("ascii") if tls_ca else None)


def check_credentials(token: str | None, tls_ca: bytes | None) -> None:
    """Raise OptionError for a token or key that no header can carry, without telling it, or for no certificate."""
    if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
        hint = "Check the file of the token."
        raise OptionError("The token is empty, or has a character that cannot be sent.", hint=hint)
    try:
        if tls_ca:
            trusting(tls_ca)
    except (ssl.SSLError, ValueError) as error:
        raise OptionError("--tls-ca is not a certificate in PEM form.", hint="Give the file that signs.") from error


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address and credentials for a server.

    Loopback connections are plaintext, as are all with `insecure`; others use TLS, with the system's roots or `tls_ca`
    (PEM). So do all with `tls_ca` or with `tls_name`, which is the name in the server's certificate, if not the host's.
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
            raise OptionError(f"--tls-name {self.tls_name} is no name.", hint="Give the one in its certificate.")

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
    """What an error means before a server's first answer: one that speaks otherwise may want TLS, or HTTP."""
    says = error.message if isinstance(error, CloudLost) else ""
    if "Failed parsing HTTP/2" in says:
        hint = f"If it is a server without skydraft, its address is http://{options.address}."
        return WrongServer(f"The server at {options.target} does not speak skydraft's protocol.", hint=hint)
    if "Socket closed" in says and not options.uses_tls:
        return CloudLost(f"{says} If it wants TLS, give --tls-ca.")
    return error
