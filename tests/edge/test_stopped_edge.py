"""An edge that was itself stopped, as by Ctrl-Z or with its machine: time that nobody watched is no silence."""

import signal
import subprocess
import sys
import time

import pytest

import skydraft
from skydraft import DecodingParams
from skydraft.engines.toy import open_toy

from ..cloud.driver import slow_toy
from ..serving import PATIENCE_S, serving

TIMEOUT_S, NUM_TOKENS = 1.0, 24
CODE = """
import contextlib, skydraft
from skydraft.engines.toy import open_toy
params = skydraft.DecodingParams(max_new_tokens={n}, min_new_tokens={n}, temperature=0.8, seed=3)
with contextlib.closing(skydraft.connect({address!r}, timeout_s={timeout})) as cloud:
    given = {{"edge": open_toy("toy:drift=0.2"), "cloud": cloud, "plan": skydraft.make_plan({plan})}}
    text = skydraft.generate("语速", params=params, **given)
    for round in text.rounds():
        print("round", flush=True)
    print(*text.token_ids)
"""


@pytest.mark.parametrize("plan", ["k=4", "'cloud'"])
def test_an_edge_that_was_stopped_for_longer_than_it_waits_keeps_its_text(plan: str) -> None:
    with serving(slow_toy(0.2)) as server:
        code = CODE.format(n=NUM_TOKENS, address=server.address, timeout=TIMEOUT_S, plan=plan)
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as edge:
            assert edge.stdout is not None
            edge.stdout.readline()
            for _ in range(3):
                edge.send_signal(signal.SIGSTOP)
                time.sleep(1.4 * TIMEOUT_S)
                edge.send_signal(signal.SIGCONT)
                time.sleep(0.2)
            out, err = edge.communicate(timeout=PATIENCE_S)
    assert (edge.returncode, err) == (0, "")
    params = DecodingParams(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, temperature=0.8, seed=3)
    text = skydraft.generate("语速", cloud=open_toy("toy"), params=params, plan=skydraft.make_plan("cloud")).run()
    assert out.splitlines()[-1] == " ".join(map(str, text.token_ids))
