"""The options that say where a cloud is, and how they become a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import click

from skydraft import api
from skydraft.cli.options import Command, add_options
from skydraft.edge.cloud import Cloud
from skydraft.errors import OptionError

T = TypeVar("T")

_CLOUD = [
    click.option("--cloud", metavar="HOST:PORT", help="Verify with this server instead of a model in this process."),
    click.option("--cloud-token-file", metavar="FILE", help="File with the bearer token for the server."),
    click.option("--tls-ca", metavar="FILE", help="PEM certificates to trust instead of the system's."),
    click.option("--tls-name", metavar="NAME", help="Name in the server's certificate, where it is not the host's."),
    click.option("--insecure", is_flag=True, help="Speak plaintext beyond this machine."),
    click.option(
        "--cloud-timeout", type=float, metavar="S", help="Seconds to wait for a cloud that does not answer (30)."
    ),
]
_USE = [
    click.option("--require-cloud", is_flag=True, help="Stop with an error instead of going on alone."),
    click.option(
        "--open",
        "open_when",
        type=click.Choice(["lazy", "ahead"]),
        help="Open the session at the first escalation (default with a gate), or ahead, in the background.",
    ),
]


def cloud_options(command: Command) -> Command:
    """Add the options that say where the cloud is and how to get in."""
    return add_options(_CLOUD, command)


def cloud_use_options(command: Command) -> Command:
    """Add the options that say how a generation uses the cloud."""
    return add_options(_USE, command)


def take_cloud(given: dict[str, Any]) -> Cloud | None:
    """Take the options of the cloud out of what was given; None without --cloud. Raises OptionError."""
    address = given.pop("cloud")
    names = ("cloud_token_file", "tls_ca", "tls_name", "insecure", "cloud_timeout", "require_cloud", "open_when")
    chosen = {name: value for name in names if (value := given.pop(name, None)) not in (None, False)}
    if address is None:
        if chosen:
            option = {"open_when": "open"}.get(name := next(iter(chosen)), name).replace("_", "-")
            raise OptionError(f"--{option} says how to use a cloud server, which --cloud HOST:PORT names.")
        return None
    token_file, ca_file = chosen.get("cloud_token_file"), chosen.get("tls_ca")
    return api.connect(
        address,
        token=_read_token(token_file) if token_file else None,
        tls_ca=_read(ca_file) if ca_file else None,
        tls_name=chosen.get("tls_name"),
        insecure="insecure" in chosen,
        timeout_s=chosen.get("cloud_timeout", 30.0),
        require="require_cloud" in chosen,
        open_ahead=chosen.get("open_when") == "ahead",
        notify=lambda line: click.echo(f"skydraft: {line}", err=True),
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from error


def _read_token(path: str) -> str:
    """The token in a file: a line with it alone, or with its label before it, as the server's file has them."""
    lines = _read(path).decode(errors="replace").splitlines()
    fields = [line.partition("#")[0].split() for line in lines]
    found = [field[-1] for field in fields if field]
    if len(found) != 1 or not found[0].isascii():
        raise OptionError(f"{path} holds {len(found)} tokens; it must hold one.")
    return found[0]
