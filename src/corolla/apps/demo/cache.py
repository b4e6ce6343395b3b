"""Where the cache was before the model layer had one: the names, for those who still look for them here."""

from corolla.models.disk_cache import Say as Say
from corolla.models.disk_cache import build_once as build_once
from corolla.models.disk_cache import user_cache as user_cache
