"""Known models, their files on this machine, downloads, and the meaning of a model argument."""

from skydraft.models.cache import cache_dir, present
from skydraft.models.manifest import KNOWN, default_pair
from skydraft.models.resolve import resolve
from skydraft.models.sources import Progress, SourceName, no_progress

__all__ = ["KNOWN", "Progress", "SourceName", "cache_dir", "default_pair", "no_progress", "present", "resolve"]
