"""Options of a server."""

from dataclasses import dataclass, field
from pathlib import Path

from skydraft.access.limits import Limits
from skydraft.config import Execution, check_execution
from skydraft.errors import OptionError
from skydraft.protocol.address import DEFAULT_PORT, check_encrypted


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`port` 0 takes a free port; `metrics_port` 0 serves no metrics. Plaintext beyond this machine needs `insecure`.
    At the end, open requests have `grace_s` seconds to finish. `execution` None is the engine's default."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    execution: Execution | None = None
    metrics_port: int = 0
    grace_s: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.execution is not None:
            check_execution(self.execution)
        if not 0 <= self.grace_s < float("inf"):
            raise OptionError(f"--grace must be a number of seconds, 0 or more, not {self.grace_s:g}.")
        check_encrypted(self.host, self.tls_cert, self.tls_key, insecure=self.insecure, flag="--insecure")
