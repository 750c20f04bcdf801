"""The port's settings from the environment, and the check whether a vLLM can take drafts."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_PORT = 7374
_PREFIX = "SKYDRAFT_DRAFTS_"
_HERE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Settings:
    """`tokens` has the label of each device's key, by key. Without it every device may send drafts."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tokens: dict[str, str] | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_environment(cls, engine_index: int = 0) -> "Settings":
        """Read the settings. Engine n of a data-parallel vLLM listens on port + n. Raises ValueError if invalid."""
        given = {name[len(_PREFIX) :]: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
        if unknown := given.keys() - {"HOST", "PORT", "TOKENS", "TLS_CERT", "TLS_KEY", "INSECURE"}:
            raise ValueError(f"{_PREFIX}{min(unknown)} is unknown")
        host, port = given.get("HOST", "127.0.0.1"), given.get("PORT", str(DEFAULT_PORT))
        if not port.isdecimal() or not 0 <= int(port) + engine_index < 65536:
            raise ValueError(f"{_PREFIX}PORT is {port}, which is no port number")
        tls = None
        if certificate := given.get("TLS_CERT"):
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate, given.get("TLS_KEY"))
        tokens = _read_tokens(Path(path)) if (path := given.get("TOKENS")) else None
        if host not in _HERE and not (tls and tokens) and given.get("INSECURE") != "1":
            raise ValueError(
                f"devices could reach {host} without TLS and tokens. Give {_PREFIX}TLS_CERT, {_PREFIX}TLS_KEY and "
                f"{_PREFIX}TOKENS, or allow that with {_PREFIX}INSECURE=1"
            )
        return cls(host, int(port) + engine_index if int(port) else 0, tokens, tls)


def _read_tokens(path: Path) -> dict[str, str]:
    """Read lines `LABEL TOKEN`, the format of `skydraft serve --token-file`."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [words for words in lines if words and not words[0].startswith("#")]
    if not lines or any(len(words) != 2 or len(words[1]) < 16 for words in lines):
        raise ValueError(f"{path} must have lines LABEL TOKEN, with tokens of 16 characters or more")
    return {token: label for label, token in lines}


def unfit(vllm_config: Any) -> str:
    """Return why this vLLM worker cannot take drafts; "" if it can."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "vLLM has no speculation with pipeline parallelism"
    if (method := getattr(speculative, "rejection_sample_method", "standard")) != "standard":
        return f"rejection_sample_method is {method}, but only 'standard' leaves the text unchanged"
    if parallel.rank % parallel.tensor_parallel_size:
        return "vLLM takes drafts only from the first tensor-parallel rank, and this is another one"
    return ""
