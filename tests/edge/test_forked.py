"""A process that was forked after a cloud was used: the threads of its connections stayed behind."""

import os
import signal
import subprocess
import sys

import pytest

from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, serving
from ..stock.fakes import fake

# Uses a cloud, forks, and tells what becomes of it in the child: texts of the same cloud, of a new one, and one that
# the parent began.
PROGRAM = """
import os, sys
import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy
from skydraft.errors import SkydraftError

def write(cloud, mode="cloud"):
    params = DecodingParams(max_new_tokens=8)
    return skydraft.generate("语速", edge=open_toy("toy"), cloud=cloud, plan=make_plan(mode), params=params, raw=True)

cloud = skydraft.connect(sys.argv[1], timeout_s=5)
write(cloud).run()
begun = iter(write(cloud))
next(begun)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
new = lambda: skydraft.connect(sys.argv[1], timeout_s=5)
for text in (lambda: begun, lambda: write(cloud), lambda: write(cloud, "lossless"), lambda: write(new())):
    try:
        print(list(text()), flush=True)
    except SkydraftError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
cloud.close()
os._exit(0)  # as processes of multiprocessing end
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_forked_process_is_told_so(kind: str) -> None:
    """gRPC hung or raised an error of asyncio."""
    with fake("vllm") as stock, serving(open_toy("toy")) as own:
        program = [sys.executable, "-c", PROGRAM, stock.url if kind == "stock" else own.address]
        for _ in range(20):  # a fork while threads are within gRPC may end the child before its first line
            done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode != 256 - signal.SIGSEGV:
                break
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("OptionError: This process was forked after a cloud was used"), lines
