"""Object stores behind one small interface: a local folder, or any S3 endpoint.

Both keep what the core asks of a store (its ObjectStore protocol): objects appear whole or not at all, ``create`` has
exactly one winner, a missing key is FileNotFoundError, anything else that survived bounded retries is another OSError.
Both pickle as configuration only; connections and credentials never travel. PatientStore wraps either of them and
outlasts outages.
"""

from __future__ import annotations

from infra.object_store.keys import check_key
from infra.object_store.local import LocalObjectStore
from infra.object_store.opening import bare_store, open_store, probe_store
from infra.object_store.patient import PatientStore
from infra.object_store.s3 import S3ObjectStore

__all__ = [
    "LocalObjectStore",
    "PatientStore",
    "S3ObjectStore",
    "bare_store",
    "check_key",
    "open_store",
    "probe_store",
]
