"""One server of each kind for all tests that leave it as it was; and servers of other people, as processes:
llama-server out of xllamacpp, and `vllm serve` on a processor.

Each of these has an environment of its own, which `make stock` sets up; LLAMA_SERVER and VLLM name them elsewhere.
Where one is absent its tests are skipped. Nothing of ours is in them while they serve.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import httpx2 as httpx
import pytest

import skydraft
from skydraft import Generation
from tests import toys
from tests.engines.conftest import gguf_path  # noqa: F401
from tests.hostile.texts import TARGET, write
from tests.serving import free_port
from tests.starting import ROOT
from tests.stock.fakes import IDS, Fake, fake
from tests.stock.faults import Fault

# `write` a text with this plan while the server answers so; gives it and how many requests it took.
Spoilt: TypeAlias = Callable[..., tuple[Generation, int]]

SEED = 17
LLAMA_SERVER = ROOT / os.environ.get("LLAMA_SERVER", ".venv-llama-server")
VLLM = ROOT / os.environ.get("VLLM", ".venv-vllm")
START_S = 900.0  # vLLM takes one minute on two cores that are idle
_END_S = 60.0  # vLLM does not end by itself if it is told to while it starts
# One thread each: threads that wait for each other on busy cores take fifty times as long.
_QUIET = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[str, Any]]:
    """A connection to each kind of server that is sent ids; it was started with penalties of its own."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", toys.PROMPT)  # this vocabulary can read no other text
        found = {}
        for dialect in IDS:
            server = stack.enter_context(fake(dialect, engine=toys.toy(SEED)))
            server.model.usual = {"repetition_penalty": 1.3, "presence_penalty": 1.5}
            found[dialect] = stack.enter_context(closing(skydraft.connect(server.url, require=True)))
        yield found


@pytest.fixture(scope="module")
def spoilt() -> Iterator[Spoilt]:
    """A text from a server of the kind `api`, and how many requests it took."""
    with ExitStack() as stack:

        @cache
        def met(api: str) -> tuple[Fake, Any]:
            server = stack.enter_context(fake("openai" if api == "chat" else api, TARGET))
            cloud = skydraft.connect(server.url, timeout_s=20, api=api, model="toy")
            stack.enter_context(closing(cloud))
            write(cloud, "cloud", raw=api != "chat").run()
            return server, cloud

        @cache
        def spoil(api: str, plan: str, fault: Fault | None = None) -> tuple[Generation, int]:
            server, cloud = met(api)
            begun = len(server.generating)
            server.storm(fault)
            try:
                return write(cloud, plan, raw=api != "chat").run(), len(server.generating) - begun
            finally:
                server.wait_until_idle()
                server.storm(None)

        yield spoil


def said(*texts: str) -> list[Any]:
    """Events of a chat."""
    return [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in texts]


@contextmanager
def _process(command: list[str | Path], url: str) -> Iterator[str]:
    """Run it until the block ends; its address once it is well. Fails with what it said when it ends before."""
    log = ROOT / "build" / f"{Path(command[0]).name}.log"
    log.parent.mkdir(exist_ok=True)
    with (
        log.open("wb") as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, cwd=log.parent, env=os.environ | _QUIET
        ) as server,
    ):
        try:
            end = time.monotonic() + START_S
            while not _is_well(url):
                if server.poll() is not None or time.monotonic() > end:
                    raise AssertionError(log.read_text(errors="replace")[-2000:])
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def llama_server(model: Path, *options: str, slots: int = 2, context: int = 4096, port: int = 0) -> Iterator[str]:
    """The address of a llama-server with a GGUF file; `context` tokens for each slot. At a free port, unless one is
    given."""
    python = LLAMA_SERVER / "bin" / "python"
    if not python.exists():
        pytest.skip("llama-server is not installed; make stock installs it")
    port = port or free_port()
    program = Path(__file__).with_name("llama_server.py")
    command = [python, program, model, str(port), str(slots), str(context), "1", *options]
    with _process(command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def vllm_serve(folder: Path, *options: str, context: int = 2048) -> Iterator[str]:
    program = VLLM / "bin" / "vllm"
    if not program.exists():
        pytest.skip("vLLM is not installed; make stock installs it")
    port = free_port()
    named = {"--served-model-name": "stock", "--host": "127.0.0.1", "--port": str(port), "--dtype": "float32",
             "--max-model-len": str(context), "--block-size": "32"}  # fmt: skip
    flags = ["--enforce-eager", "--enable-prompt-tokens-details", *options]
    with _process(
        [program, "serve", folder, *(word for pair in named.items() for word in pair), *flags],
        f"http://127.0.0.1:{port}",
    ) as url:
        yield url
