"""Replication: every cluster has a dataset whole, or you know exactly what is missing."""

from datasync.replicate.run import Options, Outcome, Stop, replicate

__all__ = ["Options", "Outcome", "Stop", "replicate"]
