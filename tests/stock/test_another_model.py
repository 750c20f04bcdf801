"""Behind an address another model answers than before, while no text is under way: an error, then all is well."""

from contextlib import closing
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, make_plan
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError, TargetChanged, VocabularyMismatch
from skydraft.models import KNOWN, cache_dir, default_pair
from skydraft.models.cache import model_path
from tests.hostile.texts import LENGTH, TARGET, letters, write
from tests.serving import free_port
from tests.stock.fakes import IDS, Fake, fake
from tests.stock.real import llama_server
from tests.thinking.scripts import thinking_toy

OTHER = letters("toy:drift=0.9")
ALONE = write(OTHER, "cloud").run().token_ids


def start_again(server: Fake, engine: Engine, name: str) -> None:
    server.kill()
    server.become(engine, name)
    server.start()


@pytest.mark.parametrize("plan", ["cloud", "gated"])
@pytest.mark.parametrize(
    ("dialect", "engine", "name", "error"),
    [("llama-server", OTHER, "toy", TargetChanged)]  # another file under the same name
    + [(each, OTHER, "another", TargetChanged) for each in IDS]
    + [(each, thinking_toy(), "toy", VocabularyMismatch) for each in IDS],
)
def test_another_model_is_told(dialect: str, engine: Engine, name: str, error: type[SkydraftError], plan: str) -> None:
    """Another model of an idle server is an error, and then the target."""
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        assert cloud.facts(None)
        for _ in range(2):
            assert len(write(cloud, plan).run().token_ids) == LENGTH
            start_again(server, TARGET, "toy")  # the same model is no other
        start_again(server, engine, name)
        text = write(cloud, plan)
        with pytest.raises(error):
            text.run()
        assert text.rounds_so_far == ()
        if error is VocabularyMismatch:
            with pytest.raises(error):
                write(cloud, plan).run()
        else:
            assert (facts := cloud.facts(None)) and facts.name == name
            assert write(cloud, "cloud").run().token_ids == ALONE


@pytest.mark.stock
def test_two_llama_servers_behind_one_port_one_after_the_other(gguf_path: Path) -> None:
    port, params = free_port(), DecodingParams(max_new_tokens=12)
    models = (gguf_path, model_path(KNOWN[default_pair().target], cache_dir()))
    with closing(skydraft.load(str(gguf_path), EngineOptions(num_threads=1, context_len=512))) as edge:

        def ask() -> str:
            plan = make_plan("cloud")
            return skydraft.generate("What is TCP?", edge=edge, cloud=cloud, plan=plan, params=params).run().text

        with closing(skydraft.connect(f"http://127.0.0.1:{port}", require=True)) as cloud:
            with llama_server(models[0], context=512, port=port):
                first, facts = ask(), cloud.facts(None)
            with llama_server(models[1], context=512, port=port):
                with pytest.raises(TargetChanged, match=r"runs .*1\.5b.* now; this text began with .*0\.5b"):
                    ask()
                second, now = ask(), cloud.facts(None)
        assert facts and now and (first, facts.weights) != (second, now.weights) and "1.5b" in now.name and second
