"""Where a server is, and whether the way there leaves this machine."""

from __future__ import annotations

import ipaddress
import re

from skydraft.errors import OptionError

DEFAULT_PORT = 7373


def is_loopback(host: str) -> bool:
    """Whether an address never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST, HOST:PORT or [IPV6]:PORT. Raises OptionError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bracketed = re.fullmatch(r"\[([^][]+)\]", host)
    bare = bracketed[1] if bracketed else host
    if not bare or re.search(r"[][/\s]", bare) or (":" in bare and not bracketed):
        raise OptionError(
            f"'{text}' is not the address of a server.", hint="Write HOST:PORT, for example cloud.example:7373."
        )
    if not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise OptionError(f"'{port}' is not a port.", hint="Write HOST:PORT, for example cloud.example:7373.")
    return host, int(port)
