"""In which order a shard wants the stages of the model: what the last one has taught."""

from __future__ import annotations

__all__ = ["Course"]


class Course:
    """The order in which the stages were wanted that were not at hand."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, bool], int] = {}
        self._last: tuple[int, bool] | None = None

    def begin(self) -> None:
        """Begin a shard, with no stage at hand."""
        self._last = None

    def after(self, stage: int, in_backward: bool) -> int | None:
        """Note that a stage is wanted now; say which one followed it last time, if one did."""
        if self._last is not None:
            self._following[self._last] = stage
        self._last = stage, in_backward
        return self._following.get(self._last)
