"""The section that says where a cloud server is and how to use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from skydraft import api
from skydraft.cli.model_options import ModelChoice
from skydraft.cli.options import GateChoice
from skydraft.cli.sections import Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.engines.base import Engine
from skydraft.errors import OptionError
from skydraft.protocol.address import parse_addresses

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud

OpenWhen = Literal["lazy", "ahead"]
OnTargetChange = Literal["stop", "continue"]
_ONE_OF_MANY_S = 5.0  # how long doctor asks one of several servers


@dataclass(frozen=True, slots=True)
class CloudChoice:
    """A cloud server, or several, and how to use it. Raises OptionError for options without one.

    `address` is None for no server; several stand in it with commas between.
    """

    address: str | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_name: str | None = None
    insecure: bool = False
    timeout_s: float | None = None
    require: bool = False
    open_when: OpenWhen | None = None
    on_target_change: OnTargetChange | None = None
    work_ahead: bool | None = None

    def __post_init__(self) -> None:
        given = {
            "--cloud-token-file": self.token_file, "--tls-ca": self.tls_ca, "--tls-name": self.tls_name,
            "--insecure": self.insecure, "--cloud-timeout": self.timeout_s,
            "--require-cloud": self.require, "--open": self.open_when, "--on-target-change": self.on_target_change,
            "--work-ahead": self.work_ahead, "--no-work-ahead": self.work_ahead is False,
        }  # fmt: skip
        useless = [option for option, value in given.items() if value is not None and value is not False]
        if self.address is None and useless:
            raise OptionError(
                f"{useless[0]} is about a cloud server, and none was named.", hint="Name one with --cloud HOST:PORT."
            )

    def check(self, models: ModelChoice, gate: GateChoice | None = None) -> None:
        """Raise OptionError where an option does not go together with the server."""
        if self.address is None:
            return
        if models.cloud_model:
            raise OptionError("--cloud-model runs a target in this process, --cloud uses one on a server: choose one.")
        if gate is None:
            return
        if gate.execution:
            raise OptionError("--execution is for the server to choose.", hint="Give it to skydraft serve.")
        if not gate.plan.verifies:
            raise OptionError("--cloud does not apply here: the draft model works alone, and nothing is checked.")
        if not gate.plan.is_gated and self.require:
            raise OptionError(
                "--require-cloud changes nothing: everything is checked here, so the cloud is needed anyway."
            )
        takes_any = gate.plan.is_gated and gate.plan.gate.kind != "calibrated"
        if self.on_target_change == "continue" and not takes_any:
            raise OptionError("This text stops when the target changes: it is the target's own, or made for it.")
        if not gate.plan.is_gated and self.open_when:
            raise OptionError("--open does not apply here: everything is checked, so the session opens at once.")

    def connect(self, notify: Callable[[str], None] | None = None) -> Cloud | None:
        """The server, or None. Nothing is sent yet. News of it go to `notify`, or to stderr. Raises OptionError."""
        return None if self.address is None else self.connected(notify)

    def connected(self, notify: Callable[[str], None] | None = None) -> Cloud:
        """The server, which was named. As `connect` otherwise."""
        if self.address is None:
            raise OptionError("No cloud server was named.", hint="Name one with --cloud HOST:PORT.")
        return api.connect(
            self.address,
            token=_read_token(self.token_file) if self.token_file else None,
            tls_ca=_read(self.tls_ca) if self.tls_ca else None,
            tls_name=self.tls_name,
            insecure=self.insecure,
            timeout_s=30.0 if self.timeout_s is None else self.timeout_s,
            require=self.require,
            open_ahead=self.open_when == "ahead",
            work_ahead=self.work_ahead,
            on_target_change=self.on_target_change or "continue",
            notify=notify or TERMINAL.say,
        )

    def each(self) -> list[CloudChoice]:
        """Every server by itself, to be looked at; one of several is waited for less. Raises OptionError."""
        addresses = parse_addresses(self.address or "")
        timeout_s = self.timeout_s or (None if len(addresses) == 1 else _ONE_OF_MANY_S)
        return [replace(self, address=address, timeout_s=timeout_s) for address in addresses]

    @contextmanager
    def whole_pair(self, models: ModelChoice) -> Iterator[tuple[Engine, Engine | Cloud]]:
        """Both sides, whatever the plan, since it may change; the connection is closed at the end."""
        remote = self.connect()
        if remote is None:
            yield models.load_pair()
            return
        with closing(remote):
            yield models.load_edge(), remote

    @contextmanager
    def sides(self, models: ModelChoice, gate: GateChoice) -> Iterator[tuple[Engine | None, Engine | Cloud | None]]:
        """The edge and the cloud of a generation, as far as its plan needs them; the connection is closed at the end.

        Raises what loading a model raises, and OptionError.
        """
        remote = self.connect()
        if remote is None:
            edge = models.load_edge() if gate.plan.drafts else None
            yield edge, models.load_target() if gate.plan.verifies else None
            return
        with closing(remote):
            yield models.load_edge(), remote  # for its tokenizer, if it does not draft


_SERVER = [
    option(
        "--cloud address", "HOST:PORT", "Use the target on this server instead of one in this process. Several servers "
        "that run the same, with commas between, share the sessions.",
    ),
    option("--cloud-token-file token_file", "FILE", "File with the token that the server wants.", type=Path),
    option("--tls-ca", "FILE", "Trust the PEM certificates in FILE, not the system's.", type=Path),
    option("--tls-name", "NAME", "Name in the server's certificate, where it is not HOST."),
    option("--insecure", None, "Allow an unencrypted connection to another machine.", is_flag=True),
    option("--cloud-timeout timeout_s", "S", "Give up after S seconds without an answer (default: 30).", type=float),
]  # fmt: skip
_USE = [
    option("--require-cloud require", None, "Fail when the cloud is gone, instead of going on alone.", is_flag=True),
    option(
        "--open open_when", None, "Open the session when it is first needed, or ahead of that (default: lazy).",
        type=click.Choice(get_args(OpenWhen)),
    ),
    option(
        "--on-target-change", None, "When the server comes back with another model: go on, with a notice, or stop. A "
        "lossless or calibrated text always stops (default: continue).", type=click.Choice(get_args(OnTargetChange)),
    ),
    option(
        "--work-ahead/--no-work-ahead", None, "Draft what would follow the likeliest verdict while one is waited for "
        "(pays where the device has a core to spare; default: off).", default=None,
    ),
]  # fmt: skip

cloud_section = Section("cloud", "Cloud", CloudChoice, [*_SERVER, *_USE])
server_section = Section("cloud", "Cloud", CloudChoice, _SERVER)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.", hint="Check its name.") from error


def _read_token(path: Path) -> str:
    """The token in a file: on a line of its own, or after its label, as in the server's file."""
    lines = _read(path).decode(errors="replace").splitlines()
    fields = [line.partition("#")[0].split() for line in lines]
    found = [field[-1] for field in fields if field]
    if len(found) != 1 or not found[0].isascii():
        raise OptionError(
            f"{path} holds {len(found)} tokens, and it must hold one.", hint="Copy one line of the server's file."
        )
    return found[0]
