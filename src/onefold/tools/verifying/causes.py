"""Explains why the mathematics of a step may differ, from observations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from onefold.tools.verifying.mathematics import Comparison

__all__ = ["Cause", "causes_of"]

_NEVER_THE_MEAN = ("weights-none", "ignored-none")
"""Findings that the numbers cannot show, because they are the same with any number of shards."""
_ANY = ("mean", "sum", "weighted", "dependent", "unclear")
_SEEN_IN = {
    "sum": _ANY,
    "weights": _ANY,
    "ignored": _ANY,
    "tokens": ("weighted", "mean", "unclear"),
    "maybe-sum": ("sum",),
    "maybe-whole": ("sum",),
}
"""Relations of the numbers that confirm a finding, by kind of finding."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause of a difference."""

    kind: Literal["error", "note"]
    """Severity. A comparison with only notes does not fail."""
    text: str
    """Description of the cause and its remedy."""


def causes_of(
    found: Comparison, attributes: Sequence[str], generators: Sequence[str]
) -> list[Cause]:
    """List the likely causes, the most likely first; none if nothing differs.

    Args:
        found: comparison of a step.
        attributes: module attributes that the step changed.
        generators: the script's own generators that the step advanced.
    """
    if found.carried:
        return [_note(found, "carried")]
    causes = []
    # Findings that are wrong with a single shard too.
    if found.finding is not None and found.finding.kind in _NEVER_THE_MEAN:
        causes.append(Cause("error", f"the loss is {found.finding.text}"))
    several = (found.loss_difference, found.gradient_difference, found.worst_difference)
    # NaN means that the step made no update and was not compared.
    if any(value > found.tolerance for value in several):
        likely = [*_of_the_state(found, attributes, generators), *_of_the_numbers(found)]
        causes += [Cause("error", text) for text in likely]
        # Notes only if no cause explains the difference: the script is not at fault in either case.
        if not causes and found.unmatched:
            causes = [_note(found, "unmatched")]
        elif not causes and found.norms and found.repeats:
            causes = [_note(found, "norms")]
        causes = causes or [Cause("error", _unknown(found))]
    causes += [Cause("error", f"buffer {name} is {text}") for name, text in found.buffers.items()]
    return causes


def _of_the_state(
    found: Comparison, attributes: Sequence[str], generators: Sequence[str]
) -> Iterator[str]:
    # If the loss is repeatable, changed state does not affect it.
    if found.repeats:
        return
    for words, why in (
        (generators, "a separate generator, which no step seed reaches"),
        (attributes, "changed by the loss, but not a buffer"),
    ):
        if words:
            yield f"{', '.join(words)}: {why}, so the same samples give a different loss each time"
    if not generators and not attributes:
        yield (
            "the same samples give a different loss when it is computed again: the loss keeps "
            "state from call to call (a hidden state?), or uses a generator other than the global "
            "ones of torch, random and NumPy"
        )


def _of_the_numbers(found: Comparison) -> Iterator[str]:
    if found.time_first:
        yield (
            f"the batch was cut along time: {', '.join(found.time_first)} takes time in the first "
            f"dimension of its input and samples in the second (batch_first=False), but the first "
            f"dimension is cut into shards. Cut along the samples with trainer.step(batch, dim=1); "
            f"or make them the first dimension of every tensor of the batch, and use "
            f"batch_first=True or transpose in the model"
        )
    finding = found.finding
    if finding is not None and found.relation in _SEEN_IN.get(finding.kind, ()):
        yield f"the loss is {finding.text}"
    elif found.relation in _CAUSES:
        yield _CAUSES[found.relation]
    # In both cases samples depend on each other in a way that the notes explain.
    excused = found.unmatched or (found.norms and not found.ordered)
    depends = found.relation == "dependent" or (
        found.relation == "unclear" and found.differentiates
    )
    if depends and not found.time_first and not excused:
        others = "places" if found.ordered and not found.dim else "others"
        kind = "gradients" if found.differentiates else others
        second = f"; all tensors of the batch have {found.second} in their second dimension"
        yield _CAUSES[kind].format("" if found.second is None else second)


_CAUSES = {
    "sum": "the loss is a sum: the loss of two parts of the batch is the sum of their losses. "
    "onefold takes a scalar as the mean over the shard's samples. Return onefold.Sum(total), or "
    "for "
    "a mean, one value per sample (reduction='none')",
    "weighted": "the loss is a mean that is not divided by the number of samples (but by tokens, "
    "pixels, class weights, or targets that are not ignored): return onefold.Mean(total, "
    "weight), or a loss from onefold.losses, which knows its denominator",
    "root": "the loss is a root of a mean or a sum over samples (RMSE, a norm), and a mean of the "
    "shards' roots is not the root of the batch. Return the mean without the root, which has the "
    "same minimum; or gather what the mean is over, such as "
    "onefold.gather(outputs - targets).square().mean().sqrt()",
    "gradients": "the loss computes gradients itself (torch.autograd.grad), such as those of the "
    "last layer for adaptive weights of its terms, and uses them: each shard has the gradients of "
    "its own samples, in V batches that are V times smaller. Compute such a weight between steps, "
    "from the whole batch, and use it as a constant in the loss; or use shards=1",
    "places": "the loss changes if samples of the batch are permuted, so the first dimension, "
    "which "
    "is cut into shards, may not be the sample dimension (time first?){}, or shards separate "
    "samples that belong together (adjacent pairs). Make the samples, or the pairs, the first "
    "dimension; trainer.step(batch, dim=1) cuts whole batches along the second one",
    "others": "a sample's loss depends on the other samples of its batch (a contrastive loss, "
    "negatives from the batch, a norm or a mean over the batch, padding that is not masked), "
    "but a shard has only its own samples: V shards give a different loss, of batches that are V "
    "times smaller. Gather the compared values with onefold.gather, compute the loss of each "
    "sample "
    "separately, or use shards=1",
}
"""Causes by the relation of a scalar loss, or by how samples depend on each other."""
_NOTES = {
    "unmatched": "the loss draws random numbers that have no counterpart for a part of the batch "
    "({}, such as a permutation of the shard's samples), so this difference may be chance: the "
    "mathematics could not be compared",
    "carried": "with the rule 'per_shard' for {}, every shard keeps its own value, and a batch "
    "that "
    "is computed as one shard has none: the mathematics could not be compared. "
    "Without the per-shard state it can be",
    "norms": "{} keeps no running statistics, so it uses the statistics of its shard, as it uses "
    "those of a device elsewhere: the mathematics could not be compared. With "
    "track_running_stats=True it can be",
}
"""Differences that are not the script's fault, by the `Comparison` field that shows them."""


def _note(found: Comparison, field: str) -> Cause:
    return Cause("note", _NOTES[field].format(", ".join(getattr(found, field))))


def _unknown(found: Comparison) -> str:
    trouble = f" A closer look failed {found.trouble}." if found.trouble else ""
    alike = "the losses agree but the gradients do not"
    seen = alike if found.loss_difference <= 1e-9 else "the losses differ"
    return (
        f"unknown ({seen}; the loss returned {found.returned}).{trouble} Check what the loss or "
        f"forward computes from more than one sample, keeps from call to call, or rounds"
    )
