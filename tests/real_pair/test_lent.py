"""What the fixtures promise: a test that fails takes no seat with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from skydraft import DecodingParams, generate
from skydraft.engines.toy import ToyEngine
from skydraft.errors import EngineError
from skydraft.models import cache_dir

from .. import toys
from .conftest import lent


class OneSeat(ToyEngine):
    """A toy with room for a single sequence, as the engines here."""

    num_taken = 0

    def allocate(self) -> list[tuple[int, int]]:
        if self.num_taken:
            raise EngineError("All sequences are in use.")
        self.num_taken += 1
        return super().allocate()

    def release(self, sequence: object) -> None:
        super().release(sequence)  # type: ignore[arg-type]
        self.num_taken -= 1


@pytest.mark.usefixtures("fixed_k")
def test_a_failed_test_leaves_no_sequence_open() -> None:
    edge, cloud = toys.toy(1, kind=OneSeat), toys.toy(2, kind=OneSeat)
    kept = []  # as the traceback of a failed test keeps what it knew
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lent(edge), lent(cloud):
            kept.append(generate("我", edge=edge, cloud=cloud, params=DecodingParams(max_new_tokens=9), raw=True))
            next(kept[-1].rounds())
            with pytest.raises(EngineError):
                edge.open([1, 2])
            raise ZeroDivisionError
    for engine in (edge, cloud):
        engine.open([1, 2]).close()
    kept.clear()
    assert edge.num_taken == cloud.num_taken == 0


def test_nothing_is_written_where_the_user_keeps_models(home: Path) -> None:
    assert cache_dir() == home
    assert all(path.is_symlink() for path in (home / "models").glob("*.gguf"))
