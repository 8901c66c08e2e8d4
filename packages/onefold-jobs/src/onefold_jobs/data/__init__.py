"""Readers of data sets in the layouts that people commonly have them in."""

from onefold_jobs.data.arrays import mnist, read_idx

__all__ = ["mnist", "read_idx"]
