"""skydraft: edge-cloud speculative decoding. A small model drafts, a gate decides, a large model checks.

The package has three groups. The first is the pair of models; begin there:

- `engines` turn tokens into logits; `choosing` turns logits into a token; `prompts` turn messages into tokens.
- `decoding` drafts, verifies and commits; `gating` decides which blocks are checked. Begin with `decoding/loop.py`.
- `protocol`, `edge` and `cloud` let the two models work on two machines; `access` has keys and shares.
- `models` finds and fetches files; `api` is the public interface, which this module exports.

`gateway` is the second group, and `lab` (evaluation, tasks, learning) the third. `cli` is the command line.
"""

import os as _os

from skydraft.api import connect, generate, load, start, without_model
from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.accounts.stats import Stats
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.errors import SkydraftError
from skydraft.gating.gates import register_gate
from skydraft.grammars import json_schema, lark, regex
from skydraft.prompts.audio import load_audio
from skydraft.types import StepRecord, Token

__version__ = "0.2.0"

# Otherwise gRPC writes a line to stderr for each idle connection that it closes. The user's own setting stays. gRPC
# reads it when it is imported, which is later.
_os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "DecodingParams", "Engine", "EngineOptions", "GenerateRequest", "Generation", "Plan", "SkydraftError", "Stats",
    "StepRecord", "Token", "connect", "decoding_params", "generate", "json_schema", "lark", "load", "load_audio",
    "make_plan", "regex", "register_gate", "start", "without_model",
]  # fmt: skip
