"""What can go wrong with the local services."""

from __future__ import annotations


class ServiceError(OSError):
    """A local service did not start, did not answer or did not end. The message names it, its log and what to do."""
