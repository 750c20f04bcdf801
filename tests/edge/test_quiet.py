"""A device that has nothing to ask for a while: its connection is closed, and nobody is told of it by gRPC itself."""

import subprocess
import sys

SCRIPT = """
import time
import skydraft
from skydraft.engines.toy import open_toy
from tests.serving import serving

with serving(open_toy("toy"), session_ttl_s=1) as server:
    edge, cloud = skydraft.load("toy"), skydraft.connect(server.address, require=True)
    for _ in range(2):
        skydraft.generate("语速", edge=edge, cloud=cloud).run()
        time.sleep(3)
"""


def test_a_connection_that_was_idle_ends_without_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
