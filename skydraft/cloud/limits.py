"""Limits of one server: in total, for each session and for each token."""

from __future__ import annotations

from dataclasses import dataclass

from skydraft.config import MAX_K
from skydraft.errors import OptionError

_BYTES_PER_AUDIO_TOKEN = 4 * 128 * 2  # frames, mels, half precision


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in tokens, rows, bytes and seconds.

    `max_sessions` limits the sessions with KV memory, `max_queue` the waiting requests, and `session_ttl_s` the time
    that a session may be idle. `sessions_per_token` (0: no limit) and `rows_per_s` (target rows, 0: no limit) apply to
    each bearer token.
    """

    max_sessions: int = 8
    max_prompt: int = 4096
    max_block: int = MAX_K
    max_queue: int = 256
    max_message_bytes: int = 256 * 1024
    session_ttl_s: float = 300.0
    sessions_per_token: int = 0
    rows_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_prompt", "max_block", "max_queue", "session_ttl_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"--{name.removesuffix('_s').replace('_', '-')} must be positive.")
        for name in ("sessions_per_token", "rows_per_s"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"--{name.replace('_', '-')} must not be negative.")

    def message_bytes(self, *, takes_audio: bool) -> int:
        """The size of the largest message: with audio, features of a prompt come in one."""
        return self.max_message_bytes + (self.max_prompt * _BYTES_PER_AUDIO_TOKEN if takes_audio else 0)
