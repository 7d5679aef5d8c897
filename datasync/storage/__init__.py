"""Stores: one interface over folders, S3 and everything fsspec reaches."""

from datasync.storage.base import Abilities, Buffer, ObjectInfo, Store, Upload, UploadInfo
from datasync.storage.open import open_store

__all__ = ["Abilities", "Buffer", "ObjectInfo", "Store", "Upload", "UploadInfo", "open_store"]
