"""Explains in words why the mathematics of a step may differ, from what was observed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from onefold.tools.verifying.mathematics import Comparison

__all__ = ["Cause", "causes_of"]

_NEVER_THE_MEAN = ("weights-none", "ignored-none")
"""Findings that the numbers cannot show: they are the same with any number of shards."""
_ANY = ("mean", "sum", "weighted", "dependent", "unclear")
_SEEN_IN = {
    "sum": _ANY,
    "weights": _ANY,
    "ignored": _ANY,
    "tokens": ("weighted", "mean", "unclear"),
    "maybe-sum": ("sum",),
    "maybe-whole": ("sum",),
}
"""By kind of finding, the relations of the numbers with which it is believed."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause of a difference."""

    kind: Literal["error", "note"]
    """How serious it is: notes alone do not fail a comparison."""
    text: str
    """The cause in words, with what to do about it."""


def causes_of(
    found: Comparison, attributes: Sequence[str], generators: Sequence[str]
) -> list[Cause]:
    """List the likely causes, the most likely first; none where nothing differs.

    Args:
        found: what the step showed.
        attributes: attributes of modules that the step changed.
        generators: generators of the script's own that the step changed.
    """
    if found.carried:
        return [_note(found, "carried")]
    causes = []
    # What is wrong with a single shard as well.
    if found.finding is not None and found.finding.kind in _NEVER_THE_MEAN:
        causes.append(Cause("error", f"the loss is {found.finding.text}"))
    several = (found.loss_difference, found.gradient_difference, found.worst_difference)
    # NaN is what a step without an update leaves in them: it was not compared.
    if any(value > found.tolerance for value in several):
        likely = [*_of_the_state(found, attributes, generators), *_of_the_numbers(found)]
        causes += [Cause("error", text) for text in likely]
        # Only where nothing better explains it: these two are no fault of the script's.
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
    # What gives the same loss twice keeps nothing that matters, whatever was seen to change.
    if found.repeats:
        return
    for words, why in (
        (generators, "a generator of its own, which no seed of the step reaches"),
        (attributes, "changed while the loss is computed, and no buffer"),
    ):
        if words:
            yield f"{', '.join(words)}: {why}, so that the same samples give another loss each time"
    if not generators and not attributes:
        yield (
            "the same samples give another loss when it is computed again: the loss keeps "
            "something from call to call (a hidden state?), or draws from a generator that is not "
            "the global one of torch, random or NumPy"
        )


def _of_the_numbers(found: Comparison) -> Iterator[str]:
    if found.time_first:
        yield (
            f"the batch was cut along time: {', '.join(found.time_first)} takes time in the first "
            f"dimension of its input and samples in the second (batch_first=False), and it is the "
            f"first one that is cut into shards. Cut along the samples with trainer.step(batch, "
            f"dim=1); or make them the first dimension of every tensor of the batch, and use "
            f"batch_first=True or transpose in the model"
        )
    finding = found.finding
    if finding is not None and found.relation in _SEEN_IN.get(finding.kind, ()):
        yield f"the loss is {finding.text}"
    elif found.relation in _CAUSES:
        yield _CAUSES[found.relation]
    # Both make samples depend on each other in a way that the notes explain.
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
    "sum": "the loss is a sum: that of two parts of the batch is the sum of theirs. onefold takes "
    "a scalar as the mean over the shard's samples. Return onefold.Sum(total), or one value a "
    "sample (reduction='none') for a mean",
    "weighted": "the loss is a mean that is not divided by the number of samples (but by tokens, "
    "pixels, weights of classes, or targets that are not ignored): return onefold.Mean(total, "
    "weight), or the loss from onefold.losses, which knows its divisor",
    "gradients": "the loss takes gradients itself (torch.autograd.grad), such as those at the last "
    "layer for an adaptive weight of its terms, and computes with them: each shard has those of "
    "its own samples, with V shards of batches V times smaller. Compute such a weight between "
    "steps, from the whole batch, and use it as a constant in the loss; or use shards=1",
    "places": "the loss changes when the samples of the batch change places, so the first "
    "dimension, which is cut into shards, may not be that of the samples (time first?){}, or "
    "samples belong together that shards tear apart (pairs side by side). Make the samples, or the "
    "pairs, the first dimension; of whole batches, trainer.step(batch, dim=1) cuts the second one",
    "others": "a sample's loss depends on the other samples of its batch (a contrastive loss, "
    "negatives from the batch, a norm or a mean over the batch, padding that is not masked out), "
    "and a shard has only its own samples: with V shards that is another loss, of batches V times "
    "smaller. Gather what it compares by onefold.gather, compute it from each sample alone, or use "
    "shards=1",
}
"""By the relation that a scalar loss shows, or else by what makes samples depend on each other."""
_NOTES = {
    "unmatched": "the loss draws random numbers that have no counterpart for a part of the batch "
    "({}, such as a permutation of the shard's samples), so this difference may be chance: the "
    "mathematics could not be compared",
    "carried": "with the rule 'per_shard' of {}, every shard goes on with its own value, and there "
    "is none for a batch that is computed as one shard: the mathematics could not be compared. "
    "Without the carried state they can be",
    "norms": "{} keeps no running statistics, so that it computes with those of its shard, as it "
    "does elsewhere with those of a device: the mathematics could not be compared. With "
    "track_running_stats=True they can be",
}
"""What is no fault of the script's, by the field of a comparison that shows it."""


def _note(found: Comparison, field: str) -> Cause:
    return Cause("note", _NOTES[field].format(", ".join(getattr(found, field))))


def _unknown(found: Comparison) -> str:
    trouble = f" A closer look failed {found.trouble}." if found.trouble else ""
    alike = "the losses agree and the gradients do not"
    seen = alike if found.loss_difference <= 1e-9 else "the losses differ"
    return (
        f"unknown ({seen}; the loss returned {found.returned}).{trouble} Look for what the loss "
        f"or forward computes from more than one sample, keeps from call to call, or rounds"
    )
