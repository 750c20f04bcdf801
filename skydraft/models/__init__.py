"""Known models, where their files lie, how they get there, and what a user's model argument means."""

from skydraft.models.cache import cache_dir
from skydraft.models.fetch import fetch
from skydraft.models.listing import Installed, installed, present_path, verify
from skydraft.models.manifest import KnownModel, KnownPair, Part, default_pair, known_models, known_pairs
from skydraft.models.progress import Progress, no_progress, progress_on
from skydraft.models.remove import remove
from skydraft.models.resolve import EMBEDDED, ModelKind, ResolvedModel, embedded_path, resolve
from skydraft.models.sources import PUBLIC_SOURCES, SourceName, Sources

__all__ = [
    "EMBEDDED",
    "PUBLIC_SOURCES",
    "Installed",
    "KnownModel",
    "KnownPair",
    "ModelKind",
    "Part",
    "Progress",
    "ResolvedModel",
    "SourceName",
    "Sources",
    "cache_dir",
    "default_pair",
    "embedded_path",
    "fetch",
    "installed",
    "known_models",
    "known_pairs",
    "no_progress",
    "present_path",
    "progress_on",
    "remove",
    "resolve",
    "verify",
]
