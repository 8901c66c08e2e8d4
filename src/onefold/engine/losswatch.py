"""Inspects what a loss returns, and refuses what onefold would read as something else."""

from __future__ import annotations

import logging

import torch

from onefold.core.counting import Count
from onefold.engine.losscheck import FindingKind, LossFinding, inspect_loss
from onefold.errors import LossError

__all__ = ["LossWatch"]

_log = logging.getLogger("onefold")
_CERTAIN: tuple[FindingKind, ...] = ("sum", "weights", "ignored")
"""Certainly read wrongly where there are several shards; the others may be intended."""


class LossWatch:
    """Watches the losses of a run.

    Scalars are inspected in every step, as a target may be ignored in any of them; values of
    samples in the first few steps, and then now and then.

    Args:
        refuses: whether a loss that is certainly read wrongly is an error.
    """

    def __init__(self, *, refuses: bool = True) -> None:
        self.refuses = refuses
        self.findings: dict[FindingKind, LossFinding] = {}
        """The first of each kind."""
        self._doubted = False

    def look(self, result: object, *, samples: int, due: bool, where: str) -> None:
        """Inspect the loss of one shard of several; with one, nothing could be read wrongly.

        Args:
            result: what the loss returned.
            samples: number of samples in the shard.
            due: whether to make the checks that cost more.
            where: step and shard, for errors.

        Raises:
            LossError: it is certain that the loss is not the one that the script means.
        """
        if not isinstance(result, torch.Tensor):
            return
        if (result.dim() or result.device.type != "cpu") and not due:
            return  # on a GPU, looking waits for the work that is under way
        finding = inspect_loss(result, samples)
        if finding is None:
            return
        if self.refuses and finding.kind in _CERTAIN:
            raise LossError(f"the loss of {where} is {finding.text}")
        # Once for each kind: the same loss would be reported in every step.
        if finding.kind not in self.findings:
            self.findings[finding.kind] = finding
            _log.warning(
                "the loss of %s is %s. To see whether it is what you mean: onefold verify",
                where,
                finding.text,
            )

    def look_at_count(self, result: object, count: Count, where: str) -> None:
        """Say once that a scalar counts all samples of a shard, where some may be left out.

        Args:
            result: what the loss returned.
            count: how many samples the shard's payload holds.
            where: step and shard.
        """
        is_scalar = isinstance(result, torch.Tensor) and not result.dim()
        if count.sure or self._doubted or not is_scalar:
            return
        self._doubted = True
        _log.warning(
            "the loss of %s is a scalar and counts as the mean of %d samples, and nothing in what "
            "collate returned has so many rows. If collate leaves out samples, return one loss a "
            "sample as onefold.Mean(losses.sum(), len(losses)); if rows are no samples there, all "
            "is well",
            where,
            count.samples,
        )
