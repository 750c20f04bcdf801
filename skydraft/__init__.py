"""skydraft: edge-cloud speculative decoding. A small model drafts, a gate decides, a large model checks."""

from skydraft.api import Generation, connect, generate, load
from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.plan import Plan, make_plan
from skydraft.engines.base import Engine, EngineOptions
from skydraft.errors import SkydraftError
from skydraft.evaluation.stats import Stats
from skydraft.types import StepRecord, Token

__version__ = "0.1.0"

__all__ = [
    "DecodingParams",
    "Engine",
    "EngineOptions",
    "Generation",
    "Plan",
    "SkydraftError",
    "Stats",
    "StepRecord",
    "Token",
    "connect",
    "decoding_params",
    "generate",
    "load",
    "make_plan",
]
