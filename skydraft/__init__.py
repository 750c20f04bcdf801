"""skydraft: edge-cloud speculative decoding. A small model drafts, a gate decides, a large model checks."""

from skydraft.api import connect, generate, load, start, without_model
from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import Stats
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.errors import SkydraftError
from skydraft.gating.gates import register_gate
from skydraft.grammars import json_schema, lark, regex
from skydraft.prompts.audio import load_audio
from skydraft.types import StepRecord, Token

__version__ = "0.2.0"

__all__ = [
    "DecodingParams", "Engine", "EngineOptions", "GenerateRequest", "Generation", "Plan", "SkydraftError", "Stats",
    "StepRecord", "Token", "connect", "decoding_params", "generate", "json_schema", "lark", "load", "load_audio",
    "make_plan", "regex", "register_gate", "start", "without_model",
]  # fmt: skip
