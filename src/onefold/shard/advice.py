"""What a user can do about a shard: errors that PyTorch raises, losses that are read otherwise.

Pure. Loaded when there is something to say.
"""

from __future__ import annotations

import torch

from onefold.system.words import message_of

__all__ = ["FINDINGS", "ONE_SAMPLE", "advice_on", "is_about_hooks", "is_shortage"]

_SHORTAGE = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words of errors that have no type of their own: PyTorch's on processors, and cuBLAS's."""

ONE_SAMPLE = (
    "This shard has one sample, and what a loss computes among the samples of a batch (negatives, "
    "a variance) is not there. onefold.gather(rows) gives the loss those of the whole batch; fewer "
    "shards give it more, and another result"
)


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in message_of(error) for sign in _SHORTAGE)


def is_about_hooks(error: BaseException) -> bool:
    """Whether an error says that hooks of saved tensors, by which parameters come, are refused."""
    return "support saved tensor hooks" in message_of(error)


def advice_on(error: Exception, *, samples: int, shards: int) -> str:
    """Say what can be done about an error of a shard; empty where PyTorch has said all.

    Args:
        error: what was raised.
        samples: number of samples in the shard.
        shards: how many shards every batch is cut into.
    """
    text = message_of(error)
    if is_shortage(error):
        return (
            f"a shard of {samples} sample{'' if samples == 1 else 's'} did not fit: run it in "
            'microbatches with Trainer(microbatch="auto") or a number of samples; or give Trainer '
            f"more than {shards} shards, a smaller batch_size or a lower precision. Each of these "
            f"changes the result. Or look for what else holds memory on this device"
        )
    if "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            "onefold has set this variable, but cuBLAS was used before Trainer was made: make "
            "Trainer before anything is computed on a GPU, or set it before the script starts"
        )
    if "does not have a deterministic implementation" in text:
        return (
            "onefold uses kernels that repeat their bits and refuses others. "
            "Trainer(deterministic=False) allows them: results then differ by rounding, from run "
            "to run as well"
        )
    if "got input1:" in text and "weight: float" in text:
        return (
            "autocast has no rule for nn.Bilinear, which then gets activations of low precision "
            "and a weight of float32. Compute it in float32, `with torch.autocast(x.device.type, "
            "enabled=False): bilinear(x.float(), y.float())`, or in low precision throughout, with "
            'precision="bf16-params"'
        )
    if samples == 1 and "more than 1 value per channel" in text:
        return f"{ONE_SAMPLE}. For batch norm there is torch.nn.SyncBatchNorm"
    if is_about_hooks(error):
        return (
            "with --placement partition devices that share no memory bring parameters while "
            "backward runs, by such hooks, which torch.func does not allow: use "
            "torch.autograd.grad in the loss, or --placement replicate"
        )
    return ""


_BY_SAMPLES = (
    ". onefold weighs a scalar by the samples of its shard and not by what it was divided by, so "
    "that the loss is not that of the whole batch. Return onefold.losses.{function}(...) with the "
    "same arguments, which hands over the total and what it is to be divided by"
)
_BY_NUMBER = (
    ", as reduction='mean' does. Return onefold.losses.{function}(...) with the same arguments and "
    "without reduction='none'; to divide by the number of samples, return "
    "onefold.Mean(losses.sum(), len(losses))"
)
FINDINGS: dict[str, str] = {
    "sum": (
        "a sum over the shard ({shown} with reduction='sum'). onefold reads a scalar as the mean "
        "over the shard's {samples}, so that loss and gradient become as many times too small as "
        "the batch has shards. Return onefold.losses.{function}(..., reduction='sum') or "
        "onefold.Sum(total) for a sum over the batch, and the loss with reduction='none' for a mean"
    ),
    "maybe-sum": (
        "a scalar that was added up and not divided. onefold reads a scalar as the mean over the "
        "shard's {samples}; were it a sum over them, loss and gradient would become as many times "
        "too small as the batch has shards. Return onefold.Sum(total) if it is a sum over the "
        "batch, onefold.Mean(total, weight) if it is to be divided, or one value a sample"
    ),
    "maybe-whole": (
        "a sum divided by {divided}, and the batch has {batch} samples, of which {samples} are in "
        "the shard. onefold reads a scalar as the mean over the shard; were {divided} a count of "
        "the whole batch, loss and gradient would become as many times too small as the batch has "
        "shards. Then return onefold.Sum(loss), or divide by the samples that the loss is given"
    ),
    "tokens": (
        "{seen}, which is no multiple of the shard's {samples} samples. onefold weighs a scalar by "
        "the samples of its shard, so that a value counts more the fewer there are in its shard. "
        "Return {losses}onefold.Mean(total, weight), where the weight is what the total is to be "
        "divided by over the whole batch"
    ),
    "weights": "a mean by class weights ({shown} with weight=)" + _BY_SAMPLES,
    "ignored": "a mean over targets of which {ignored} are ignored ({shown})" + _BY_SAMPLES,
    "weights-none": "one value a sample scaled by class weights ({shown} with weight=). onefold "
    "divides the values by the number of samples and not by the sum of their weights" + _BY_NUMBER,
    "ignored-none": "one value a sample with ignored targets among them ({shown}). onefold divides "
    "the values by the number of samples and not by those that are not ignored" + _BY_NUMBER,
}
"""For each kind of finding what the tensor is, as far as its graph shows, how onefold reads it, and
what to write instead."""
