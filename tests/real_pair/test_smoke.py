"""The demo pair in a minute: lossless gives the tokens of cloud, in one process and over a link. The laws in full are
marked long: make test-long.

Where the pair was not probed before, forwards have one row, which is exact on every machine.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import skydraft
from bench.demo import TASK_SET, tasks
from bench.workload import prompts
from skydraft import DecodingParams, Engine, make_plan
from skydraft.decoding.builder import prompted
from skydraft.edge.cloud import Cloud
from skydraft.engines.adapter import digest, read_adapter
from skydraft.engines.row_costs import RowProfile
from skydraft.lab.evaluation.comparison import request_of
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.tasks.sets import read_tasks
from skydraft.models import default_pair
from skydraft.models.adapters import shipped

from ..serving import serving
from .conftest import load

PROMPT = prompts()[0]


@pytest.fixture(scope="module")
def pair(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    profiles = tmp_path_factory.mktemp("smoke") / "profiles.json"
    if (home / "profiles.json").exists():
        shutil.copy(home / "profiles.json", profiles)
    with pytest.MonkeyPatch.context() as patch:
        one_row = RowProfile(1, (1.0,))
        patch.setattr("skydraft.engines.probe.probe", lambda engine, notify: one_row)
        with load(default_pair().draft, profiles) as edge, load(default_pair().target, profiles) as cloud:
            yield edge, cloud


def test_the_name_of_a_special_token_is_read_as_characters(pair: tuple[Engine, Engine]) -> None:
    """It was read as the end of the turn, and the answer was `a`."""
    edge, cloud = pair
    for mode in ("edge", "cloud", "lossless"):
        plan, params = make_plan(mode, k=5 if mode == "lossless" else None), DecodingParams(max_new_tokens=12)
        ask = "Repeat exactly: a<|im_end|>b"
        with skydraft.generate(ask, edge=edge, cloud=cloud, plan=plan, params=params) as text:
            assert "a<|im_end|>b" in text.run().text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_cloud_here_and_over_a_link(pair: tuple[Engine, Engine], temperature: float) -> None:
    edge, cloud = pair
    params = DecodingParams(max_new_tokens=8, temperature=temperature, seed=7)

    def written(mode: str, target: Engine | Cloud) -> tuple[int, ...]:
        plan = make_plan(mode, k=5 if mode == "lossless" else None)
        return skydraft.generate(PROMPT, edge=edge, cloud=target, plan=plan, params=params).run().token_ids

    expected = written("cloud", cloud)
    assert len(expected) == 8
    assert written("lossless", cloud) == expected
    with serving(cloud) as server, closing(skydraft.connect(server.address)) as far:
        assert written("lossless", far) == written("cloud", far) == expected


def test_the_demo_asks_nothing_that_its_adapter_has_learned_from(pair: tuple[Engine, Engine]) -> None:
    edge, _ = pair
    card = read_adapter(shipped(TASK_SET)).card

    def digests(entries: Iterable[PromptEntry]) -> set[str]:
        asks = (request_of(each, Mode("edge", make_plan("edge"))) for each in entries)
        return {digest(prompted(each, edge).prompts.edge.token_ids) for each in asks}

    wanted, learned = digests(tasks()), set(card.trained_on)
    assert card.base == edge.fingerprint and (len(learned), len(wanted)) == (125, 6)
    assert not wanted & learned
    assert learned <= digests(read_tasks(f"{TASK_SET}:dev", limit=150).prompts)  # so digests are made alike
