"""Readers for data sets in the layouts that users have."""

from onefold.data.idx import mnist, read_idx

__all__ = ["mnist", "read_idx"]
