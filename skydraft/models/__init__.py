"""Known models, their files on this machine, downloads, and the meaning of a model argument."""

from skydraft.models.cache import cache_dir, present
from skydraft.models.fetch import fetch_model, present_path, remove, verify
from skydraft.models.manifest import default_pair, known_models
from skydraft.models.progress import Progress, no_progress, progress_on
from skydraft.models.resolve import EMBEDDED, ResolvedModel, embedded_path, resolve
from skydraft.models.sources import SourceName

__all__ = [
    "EMBEDDED", "Progress", "ResolvedModel", "SourceName", "cache_dir", "default_pair", "embedded_path", "fetch_model",
    "known_models", "no_progress", "present", "present_path", "progress_on", "remove", "resolve", "verify",
]  # fmt: skip
