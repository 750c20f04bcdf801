"""What a connection has to know of encryption before it is made, and after it failed."""

from __future__ import annotations

import socket
import ssl

from skydraft.errors import OptionError

_GREETING_S = 1.0  # how long a server may take to answer a greeting


def check_certificates(pem: bytes) -> None:
    """Raise OptionError unless these are certificates."""
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise OptionError(
            "What --tls-ca names is no certificate in PEM form.", hint="Give the file that signs."
        ) from error


def speaks_tls(host: str, port: int) -> bool:
    """Whether the server there begins an encrypted connection, whoever it is."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _GREETING_S) as plain, anybody.wrap_socket(plain):
            return True
    except OSError:
        return False
