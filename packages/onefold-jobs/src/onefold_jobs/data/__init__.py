"""Readers of datasets in common layouts."""

from onefold_jobs.data.arrays import mnist, read_idx

__all__ = ["mnist", "read_idx"]
