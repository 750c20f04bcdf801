"""Addresses of servers, and whether an address is on this machine."""

import ipaddress
import re
from pathlib import Path

from skydraft.config import is_number
from skydraft.errors import OptionError

DEFAULT_PORT = 7373
DRAFTS_PORT = 7374  # of skydraft-vllm
_EXAMPLE = "Write HOST:PORT, for example cloud.example:7373, or the URL of another server: http://HOST:PORT/v1."


def is_loopback(host: str) -> bool:
    number = _ip(host)
    return number.is_loopback if number else host == "localhost"


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def without_password(text: str) -> str:
    """Replace the part of addresses before an @ by ***: it may be a password."""
    return re.sub(r"((?:^|,)\s*(?:\w+://)?)[^,]*@", r"\1***@", text)


def parse_address(text: str, default: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return (host, port) of HOST, HOST:PORT or [IPV6]:PORT. Raises OptionError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or "://" in text:
        host, port = text, str(default)
    bracketed = re.fullmatch(r"\[([^][]+)\]", host)
    bare = bracketed[1] if bracketed else host
    if not bare or re.search(r"^-|[][/@\s\0\ud800-\udfff]|.{254}", bare) or (":" in bare and not bracketed):
        raise OptionError(f"'{without_password(text)}' is not the address of a server.", hint=_EXAMPLE)
    if not is_number(port) or not 0 < int(port) < 65536:
        raise OptionError(f"'{without_password(port)}' is not a port.", hint=_EXAMPLE)
    return host, int(port)


def as_origin(text: str) -> str:
    """Return the origin of a web page as browsers send it. Raises OptionError."""
    origin = text.lower().removesuffix("/")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?", origin):
        example = "Write SCHEME://HOST:PORT, for example http://localhost:3000, and give --allow-origins for each."
        raise OptionError(f"'{without_password(text)}' is not the origin of a web page.", hint=example)
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin)


def check_encrypted(host: str, cert: Path | None, key: Path | None, *, insecure: bool, flag: str) -> None:
    """Raise OptionError for a server that other machines could reach in plaintext, unless `insecure`. `flag` is its
    option."""
    if key and not cert:
        raise OptionError("--tls-key needs --tls-cert.", hint="Give both, or one file that holds both.")
    if not (cert or insecure or is_loopback(host)):
        hint = f"Give --tls-cert and --tls-key, or {flag} behind a proxy that speaks TLS."
        raise OptionError(f"On {host} keys and texts would cross the network unencrypted.", hint=hint)


def parse_addresses(text: str) -> list[str]:
    """Return HOST:PORT of each server in a comma-separated list, without repetitions. Raises OptionError."""
    servers = (parse_address(entry.strip().lower()) for entry in text.split(","))
    return list(dict.fromkeys(f"{host}:{port}" for host, port in servers))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
