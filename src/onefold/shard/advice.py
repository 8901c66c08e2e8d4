"""What a user can do about errors of PyTorch, losses that are read otherwise, and other mistakes.

Loaded when there is something to say.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F

from onefold.core.mean import Mean
from onefold.core.structure import parts_of
from onefold.shard.loss_watch import LOSSES, LossFinding, finding_of, places_in, saved
from onefold.system.words import listed, message_of

__all__ = [
    "COUNTED",
    "DENSE",
    "FINDINGS",
    "LEFT_READ",
    "ONE_SAMPLE",
    "advice_on",
    "check_adafactor",
    "check_lists",
    "inspect_totals",
    "is_about_hooks",
    "is_shortage",
    "refuse_per_sample",
    "say_few",
    "say_partitioned",
    "uneven",
    "unknown_name",
    "words_of_left",
]

_log = logging.getLogger("onefold")


_SHORTAGE = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Words of errors that have no type of their own: PyTorch's on processors, and cuBLAS's."""

ONE_SAMPLE = (
    "This shard has one sample, and what a loss computes among the samples of a batch (negatives, "
    "a variance) is not there. onefold.gather(rows) gives the loss those of the whole batch; fewer "
    "shards give it more, and another result"
)


_FROZEN = (
    "A loss that calls onefold.gather runs twice in a step, and the first time without gradients "
    "of parameters, which then cannot be differentiated by. What differentiates by parameters and "
    "not through gathered rows (a penalty) is needed in the second run alone: compute it under "
    "`if any(p.requires_grad for p in model.parameters()):`"
)
_OUTPUTS = re.compile("out|pred|logit|y_?hat|input")
_TARGETS = re.compile("target|label|true|y$")
_NOT_A_MODEL = re.compile("must be Tensor, not|unsupported operand|object (has no|is not)")
_ARGUMENTS = re.compile("positional argument")
_FUNCTIONS = {
    "bce_loss": "binary_cross_entropy",
    "bce_with_logits_loss": "binary_cross_entropy_with_logits",
    "cross_entropy_loss": "cross_entropy",
}
"""PyTorch's functions whose names are not those of their classes."""
_NO_TENSOR = re.compile("not (tuple|list|str)|'(tuple|list|str)' object")
_WHOLE = (torch.int64, torch.int32, torch.uint8)
_NAMES = {
    torch.float64: "double|float64",
    torch.float32: "float|float32",
    torch.float16: "half|float16",
    torch.int64: "long|int64",
    torch.int32: "int|int32",
    torch.uint8: "byte|unsigned char|uint8",
}
"""What PyTorch's errors call a dtype."""


DENSE = (
    "SGD without momentum and Adagrad then update as they do with sparse gradients. Adam is not "
    "SparseAdam: it moves all rows in every step, and SparseAdam those that the batch has used"
)
"""What replaces optimizers of sparse gradients."""


def unknown_name(kind: type, name: str, *_: str) -> TypeError:
    """The error for an argument that a class does not take."""
    known = [*inspect.signature(kind).parameters]
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}?" if near else f"expected some of {listed(known, 30)}"
    return TypeError(f"{kind.__name__} has no argument {name!r}: {meant}")


def say_few(samples: int, shards: int) -> None:
    """Warn that shards are empty from the first batch on."""
    _log.warning(
        "the first batch has %d samples for %d shards: the others are empty, and devices that have "
        "no others wait. Expected a batch_size of at least %d, or fewer shards, which changes the "
        "result",
        *(samples, shards, shards),
    )


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is used up."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in message_of(error) for sign in _SHORTAGE)


def is_about_hooks(error: BaseException) -> bool:
    """Whether an error says that hooks of saved tensors, by which parameters come, are refused."""
    return "support saved tensor hooks" in message_of(error)


def advice_on(
    error: Exception,
    *,
    samples: int,
    shards: int,
    loss: Callable[..., Any] | None = None,
    module: torch.nn.Module | None = None,
    payload: object = None,
) -> str:
    """Say what can be done about an error of a shard; empty where PyTorch has said all.

    Args:
        error: what was raised.
        samples: number of samples in the shard.
        shards: how many shards every batch is cut into.
        loss: the user's function.
        module: the model.
        payload: what the function was given of the batch.
    """
    text = message_of(error)
    parameters = [*module.parameters()] if module is not None else []
    if "does not require grad" in text and not any(p.requires_grad for p in parameters):
        return _FROZEN
    if advice := _on_arguments(error, text, loss, module) or _on_payload(
        error, text, payload, {p.dtype for p in parameters}
    ):
        return advice
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
_OF_MODEL = (
    ". If the model computes it, as those of transformers do, return onefold.Mean(model(**batch)"
    ".loss * n, n), where n counts the targets: (batch['labels'] != -100).sum(), and of labels[:, "
    "1:] where the model shifts them (causal language models)"
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
    "ignored": "a mean over targets of which {ignored} are ignored ({shown})"
    + _BY_SAMPLES
    + _OF_MODEL,
    "mean-total": "onefold.Mean(total, weight) whose total is a mean already ({shown}), and is "
    "divided by the weights once more. Models of transformers return one even if they are given "
    "num_items_in_batch, which many of them ignore. Return onefold.Mean(mean * weight, weight), or "
    "the total with reduction='sum'",
    "weights-none": "one value a sample scaled by class weights ({shown} with weight=). onefold "
    "divides the values by the number of samples and not by the sum of their weights" + _BY_NUMBER,
    "ignored-none": "one value a sample with ignored targets among them ({shown}). onefold divides "
    "the values by the number of samples and not by those that are not ignored" + _BY_NUMBER,
}
"""For each kind of finding what the tensor is, as far as its graph shows, how onefold reads it, and
what to write instead."""


def _on_arguments(error: Exception, text: str, loss: Any, module: object) -> str:
    """Advise on a loss that takes outputs and targets, and was given a model and a batch."""
    kind = type(module).__name__
    if loss is None or not isinstance(error, TypeError | AttributeError):
        return ""
    names = [""]
    with suppress(ValueError):  # a function that has no signature
        names = [*inspect.signature(getattr(loss, "forward", loss)).parameters, ""]
    # Of a function in between, the error is of no argument of the loss.
    given = _ARGUMENTS.search(text) is not None and f"{_called(loss)}()" in text
    usual = len(names) > 2 and _OUTPUTS.search(names[0]) and _TARGETS.search(names[1])
    is_model = _NOT_A_MODEL.search(text) and re.search(rf"\b{re.escape(kind)}\b", text)
    if not (given or is_model or (usual and _NOT_A_MODEL.search(text))):
        return ""
    function = _function_of(loss)
    ours = f"onefold.losses.{function}" if hasattr(F, function) else _name_of(loss)
    return (
        f"the loss is called with the model and the batch, here as {_name_of(loss)}({kind}, "
        f"batch). If it takes outputs and targets, give Trainer a function around it:\n"
        f"    def loss(model, batch):\n"
        f"        inputs, targets = batch\n"
        f"        return {ours}(model(inputs), targets)"
    )


def _called(loss: Any) -> str:
    return str(getattr(loss, "__name__", f"{type(loss).__name__}.forward"))


def _name_of(loss: Any) -> str:
    name = _called(loss).removesuffix(".forward")
    return name if name.isidentifier() else "criterion"


def _function_of(loss: Any) -> str:
    """The function of PyTorch's that a loss is, or the class of a loss calls."""
    words = re.sub("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", _name_of(loss)).lower()
    return _FUNCTIONS.get(words, words)


def _on_payload(
    error: Exception, text: str, payload: object, dtypes: Collection[torch.dtype]
) -> str:
    """Advise on texts, and on numbers of another dtype than the model's, in a batch."""
    if isinstance(error, TypeError | AttributeError) and _NO_TENSOR.search(text):
        for path, leaf in _leaves(payload, "batch"):
            if isinstance(leaf, str):
                return (
                    f"{path} is the text {leaf[:40]!r}, of which no tensor is made. Number labels "
                    f"where the data set returns them, such as classes.index(label)"
                )
    if not isinstance(error, RuntimeError) or "type" not in text:
        return ""
    if re.search("(?i)expected .*type.* long", text):
        return "numbers of classes are torch.int64: convert them in the data set, tensor.long()"
    for path, leaf in _leaves(payload, "batch"):
        kind = leaf.dtype if isinstance(leaf, torch.Tensor) else None
        named = _NAMES.get(kind) if kind else None
        if named and kind not in dtypes and re.search(rf"(?i)\b({named})\b|mixed dtype", text):
            way = "array.astype('float32'), as NumPy makes float64, or tensor.float()"
            if kind in _WHOLE:
                way = "tensor.float(), for images tensor.float() / 255"
            return f"{path} is {kind}. Convert it in the data set: {way}"
    return ""


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    parts = parts_of(value)
    if parts is None:
        yield path, value
    for name, part in parts or ():
        yield from _leaves(part, path + name)


def inspect_totals(result: object) -> LossFinding | None:
    """Report a total of a `Mean` that is a mean already, which would be divided twice.

    >>> outputs = torch.zeros(4, 2, requires_grad=True)
    >>> loss = torch.nn.functional.mse_loss(outputs, torch.ones(4, 2))
    >>> inspect_totals(Mean(loss, 4)).kind
    'mean-total'
    >>> inspect_totals(Mean(loss * 4, 4))
    """
    for term in getattr(result, "terms", (result,)):
        graph = term.total.grad_fn if isinstance(term, Mean) and term.weight > 1 else None
        places = list(places_in(graph, 1 << 30, scalar=True)) if graph is not None else []
        if len(places) == 1 and places[0].divisor is None and not places[0].enlarged:
            function = LOSSES.get(places[0].node.name())
            if function and saved(places[0].node, "reduction") == 1:
                return finding_of("mean-total", function)
    return None


def say_partitioned(nbytes: int, *, small: bool) -> None:
    """Say that ``replicate:state`` does as ``replicate`` with a model, and why.

    Args:
        nbytes: of its trained parameters.
        small: whether it is too small.
    """
    _log.warning(
        "replicate:state does as replicate with this model, and each device updates a part: %s",
        f"its trained parameters have {nbytes / 2**20:.2g} MiB, and 4 are needed"
        if small
        else "its optimizer may look at all parameters together, or updates float32 copies",
    )


_RETURN = (
    "return it beside the loss (`return loss, {'accuracy': ...}`), so that Step.values has it for "
    "the whole batch; or score by trainer.evaluate or trainer.predict"
)
_LEFT = {
    "parameter": "A device has there what its own shards have left, such as the gradients of "
    "single samples, so that an update by it would depend on the number of devices. onefold has "
    "one gradient of all samples, in .grad, and cannot train with differential privacy (Opacus). "
    "Compute in the loss what you need of each sample, and return it as a value",
    "metric": "Nothing adds it up over the devices: it counts this device's shards alone, and a "
    f"resumed run begins anew. Instead {_RETURN}",
}
_LEFT["module"] = _LEFT["metric"]
LEFT_READ = (
    "is read in `with trainer.modifying():`, and is what the last shard of this device left there: "
    "every device has another. Use .grad, which is of the whole batch; for anything else of the "
    f"forward pass, {_RETURN}"
)
"""The end of a sentence that begins with the place of a tensor."""


def words_of_left(where: str, place: str, kind: str) -> str:
    """Say what is wrong with state that shards leave on an object.

    Args:
        where: step or batch.
        place: the attribute, and what it is of.
        kind: of the object, as in `onefold.shard.left_state`.
    """
    return f"{where}: the shards have changed {place}. {_LEFT[kind]}"


_LOW = {torch.bfloat16, torch.float16}


def check_lists(optimizer: torch.optim.SGD) -> None:
    """Refuse kernels for lists of low-precision parameters on a processor."""
    # They round otherwise than those for single tensors, which SGD takes as long as a parameter of
    # a call of step has no momentum yet: and that is any of the segments of its device.
    for number, group in enumerate(optimizer.param_groups):
        low = {p.dtype for p in group["params"] if p.device.type == "cpu"} & _LOW
        if group["foreach"] and group["momentum"] and low:
            raise ValueError(
                f"SGD: group {number} has foreach=True, momentum and parameters of "
                f"{', '.join(sorted(map(str, low)))} on a processor, where PyTorch rounds lists of "
                f"them in another way than single ones, and chooses by what else a device updates. "
                f"Leave foreach out, which costs nothing there"
            )


def check_adafactor(optimizer: torch.optim.Adafactor) -> None:
    """Refuse groups of mixed precision, whose default eps depends on the order of parameters."""
    # PyTorch derives eps from the first parameter of a call of step, and uses it for all that
    # follow. Which parameter is the first would depend on which partition a device has.
    for number, group in enumerate(optimizer.param_groups):
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["eps"][0] is None and len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"Adafactor: group {number} has parameters of {listed} and the default eps, which "
                f"then depends on the parameter that is updated first, and so on the device. Give "
                f"eps=(1e-7, 1e-3) or the like, or a group for each dtype"
            )


def refuse_per_sample(part: object) -> None:
    """Refuse what keeps the gradient of each sample, by the names of Opacus.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{type(part).__name__} keeps the gradient of each sample, and a device has those of its "
        f"own shards alone, so that noise and clipping would depend on the number of devices and "
        f"the privacy accounting would not hold: expected a plain module and optimizer. onefold "
        f"cannot train with differential privacy"
    )


COUNTED = (
    "the loss of %s is a scalar and counts as the mean of %d samples, and nothing in what "
    "collate returned has so many rows. If collate leaves out samples, return one loss a "
    "sample as onefold.Mean(losses.sum(), len(losses)); if rows are no samples there, all "
    "is well"
)
"""A warning of step and shard, and of the number of samples."""


def uneven(batch: Any, length: int, where: str) -> str:
    """Say why a scalar is no mean of a batch whose parts are cut unevenly."""
    return (
        f"the loss of {where} is a scalar, read as the mean of the shard, in a batch "
        f"of {batch.samples} and {length} samples, of which {batch.shares.shards} "
        "shards have no equal shares: expected onefold.Mean(total, weight) for each "
        f"term, or sizes that are multiples of {batch.shares.shards}"
    )
