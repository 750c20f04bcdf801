"""What `skydraft doctor --cloud … --devices N` says: what so many devices get from the server, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

from rich.console import Console

from skydraft.cli.terminal import TERMINAL
from skydraft.config import DecodingParams
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, SkydraftError
from skydraft.evaluation.devices import Load, Recording, measure_load
from skydraft.evaluation.diagnosis import PROMPTS
from skydraft.evaluation.modes import parse_modes

_MODES = "cloud,lossless,lossless;k=5,quality,auto"
_PARAMS = DecodingParams(max_new_tokens=32)
_BUSY = 0.8  # of a core; Python uses no more than one


def measure_devices(
    console: Console, connect: Callable[[], Cloud], edge: Engine, num: int, seconds: float
) -> Iterator[str]:
    """Print what each mode gives `num` devices; yields steps for the user. `connect` makes the connection of one."""
    step_ms = edge.profile.forward_ms[0]
    console.print(
        f"\ndevices      {num} at once, {seconds:g} s in each mode, text after text of {len(PROMPTS)} prompts"
    )
    console.print("             Real: the server, the link, and each device's connection, requests and waits.")
    console.print(
        f"             Recorded: what the draft model says; a step takes {step_ms:.1f} ms, as on this machine."
    )
    console.print(
        f"             {'mode':<14}{'tokens/s':>9}{'of each':>9}{'wait p50':>12}{'p95':>12}{'/ streaming':>13}"
    )
    loads, refused = list[Load](), list[str]()
    with closing(Recording(edge)) as recording:
        for mode in parse_modes(_MODES, lambda _: _PARAMS):
            try:
                with TERMINAL.state(f"{num} devices in mode {mode.name}…"):
                    load = measure_load(connect, recording, mode, PROMPTS, num, seconds)
            except OptionError as error:
                refused.append(f"mode {mode.name}: {error.message}")
                continue
            except SkydraftError as error:
                yield f"the devices were not measured to the end: {error.line}"
                break
            loads.append(load)
            console.print(
                f"             {mode.name:<14}{load.tokens_per_s:>9.1f}{load.tokens_per_s / num:>9.1f}"
                f"{load.wait_ms:>9.1f} ms{load.late_ms:>9.1f} ms{_ratio(load, loads[0]):>14}"
            )
    for each in refused:
        console.print(f"             not measured: {each}")
    if any(load.busy > _BUSY for load in loads):
        console.print("             This machine was busy with being so many devices: the server may carry more.")
    if num_computed := sum(load.num_computed for load in loads):
        console.print(f"             The draft model computed {num_computed} tokens meanwhile that were not recorded.")


def _ratio(load: Load, first: Load) -> str:
    """Relative to streaming, if that was measured."""
    return f"{load.tokens_per_s / first.tokens_per_s:.2f}" if first.mode == "cloud" and first.tokens_per_s else ""
