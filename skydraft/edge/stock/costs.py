"""What servers without skydraft cost, remembered beside the models: the next start measures nothing."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from pydantic import TypeAdapter

from skydraft.files import read_file, write_whole

_MAX_AGE_S = 86400.0  # older ones are measured again: the server may run on something else now
_MAX_KNOWN = 100
_LOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a written token and of checks of 1, 2, … rows; `at`: when that was measured, Unix time."""

    write_ms: float
    check_ms: tuple[float, ...] = ()
    at: float = 0.0

    def of_check(self, num_rows: int) -> float:
        """Milliseconds of a check of so many rows; beyond those that were measured, in proportion."""
        known = len(self.check_ms)
        return self.check_ms[num_rows - 1] if num_rows <= known else self.check_ms[-1] * num_rows / known

    @property
    def _is_good(self) -> bool:
        age_s = time.time() - self.at
        return 0 <= age_s < _MAX_AGE_S and all(0 < ms < math.inf for ms in (self.write_ms, *self.check_ms))


_KNOWN = TypeAdapter(dict[str, Costs])


def recalled(path: Path) -> dict[str, Costs]:
    """The costs that may still be right, by server and model. A file that cannot be read counts as empty."""
    try:
        known = _KNOWN.validate_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return {key: costs for key, costs in known.items() if costs._is_good}


def remember(path: Path, key: str, costs: Costs) -> None:
    """Add costs to the file. Where it cannot be written, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_S):  # its Timeout is an OSError
            newest = sorted((recalled(path) | {key: costs}).items(), key=lambda entry: -entry[1].at)[:_MAX_KNOWN]
            write_whole(path, _KNOWN.dump_json(dict(newest), indent=1))
    except OSError:
        return
