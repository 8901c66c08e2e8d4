"""Advice for errors raised by PyTorch, misread losses, and other mistakes of users.

Loaded only when a message is needed.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F

from onefold.core.flat import all_finite
from onefold.core.mean import Mean
from onefold.core.structure import parts_of
from onefold.errors import GradientError
from onefold.shard.loss_watch import LOSSES, LossFinding, finding_of, places_in, saved
from onefold.system.words import listed, message_of

__all__ = [
    "COUNTED",
    "DENSE",
    "FINDINGS",
    "NOT_FINITE",
    "advice_on",
    "bad_gradient_of",
    "check_dtypes",
    "explain",
    "inspect_totals",
    "is_about_hooks",
    "is_shortage",
    "no_number",
    "refuse_gradients",
    "refuse_per_sample",
    "say_few",
    "say_partitioned",
    "uneven",
    "unknown_name",
    "words_of_loss",
    "wrong_part",
]

_log = logging.getLogger("onefold")


_SHORTAGE = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Fragments of errors without a specific type: PyTorch's on CPUs, and cuBLAS's."""

_ONE_SAMPLE = (
    "This shard has one sample, so a loss cannot compare the samples of a batch (negatives, a "
    "variance). Use onefold.gather(rows) to get the rows of the whole batch; fewer shards also "
    "give the loss more samples, but change the result"
)

NOT_FINITE = (
    "Check these samples: a mean over nothing (all targets ignored, an empty mask) is NaN, which "
    "onefold.losses and onefold.Mean avoid. Otherwise lower the learning rate, set clip_norm, or "
    'skip such steps with Trainer(on_nonfinite="skip")'
)

_FROZEN = (
    "A loss that calls onefold.gather runs twice per step. In the first run, parameters do not "
    "require gradients, so the loss cannot differentiate with respect to them. If a term "
    "differentiates with respect to parameters (a penalty), compute it in the second run only, "
    "under `if any(p.requires_grad for p in model.parameters()):`"
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
"""Loss classes whose functions have another name."""
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
"""Names of dtypes in PyTorch's errors."""


DENSE = (
    "SGD without momentum and Adagrad then update the same way as with sparse gradients. Adam "
    "differs from SparseAdam: it updates all rows in every step, not only the rows in the batch"
)
"""How optimizers behave with dense gradients instead of sparse ones."""


def unknown_name(kind: type, name: str, *_: str) -> TypeError:
    """Return the error for an unknown argument of a class."""
    parameters = inspect.signature(kind).parameters.items()
    known = [each for each, found in parameters if found.kind is not found.VAR_KEYWORD]
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]!r}?" if near else f"it takes {listed(known, 30)}"
    return TypeError(f"{kind.__name__} has no argument {name!r}: {meant}")


_NO_NUMBER = (
    "a step is the result of an update, and not a number. The loss is step.loss, such as "
    "float(step.loss) or f'{step.loss:.3f}', and metrics are in step.values"
)


def no_number(step: object, name: str = "") -> AttributeError | TypeError:
    """Return the error for a step that is used as a number or as a tensor.

    Args:
        step: what `Trainer.step` returned.
        name: the missing attribute; empty for an operator.
    """
    if not name:
        return TypeError(_NO_NUMBER)
    try:
        object.__getattribute__(step, name)
    except AttributeError as error:
        # Python's own message, or that of a property.
        return AttributeError(f"{error}: {_NO_NUMBER}")
    return AttributeError(name)


def wrong_part(words: str, given: object) -> TypeError:
    """Return the error for a part of a Trainer of a wrong type, such as a class.

    Args:
        words: what the part must be.
        given: the argument of the script.
    """
    if not isinstance(given, type):
        return TypeError(f"{words}, but got {type(given).__name__}")
    arguments = "model.parameters(), ..." if issubclass(given, torch.optim.Optimizer) else "..."
    return TypeError(
        f"{words}, but got the class {given.__name__}. Pass an object of it, "
        f"{given.__name__}({arguments})"
    )


def say_few(samples: int, shards: int) -> None:
    """Warn that the first batch has fewer samples than shards."""
    _log.warning(
        "the first batch has %d samples for %d shards, so some shards are empty and their devices "
        "may idle. Use a batch_size of at least %d, or fewer shards, which changes the result",
        *(samples, shards, shards),
    )


def is_shortage(error: BaseException) -> bool:
    """Whether an error reports that memory is exhausted."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in message_of(error) for sign in _SHORTAGE)


def is_about_hooks(error: BaseException) -> bool:
    """Whether an error rejects hooks of saved tensors, which gather parameters in backward."""
    return "support saved tensor hooks" in message_of(error)


def explain(error: Exception, replica: Any, shard: int, task: Any, where: str) -> None:
    """Add the shard, its device and advice to the error of a shard.

    Raises:
        StateError: a buffer was resized.
    """
    error.add_note(f"raised in {where}, on device {replica.number} ({replica.device})")
    samples = task.batch.count_of(shard).samples
    parts = {"loss": task.loss, "module": replica.module, "payload": task.batch.shards[shard]}
    advice = advice_on(error, samples=samples, shards=task.shards, **parts)
    if advice:
        error.add_note(advice)
    replica.buffers.check_shapes()


def words_of_loss(task: Any, shard: int, total: float) -> str:
    """Describe a shard's loss that is not finite."""
    batch = task.batch
    alone = f". {_ONE_SAMPLE}" if batch.size_of(shard) == 1 < batch.samples else ""
    return (
        f"the loss of step {task.step}, shard {shard} is {total}, but must be finite. It is the "
        f"loss of {batch.describe(shard)}{alone}"
    )


def bad_gradient_of(
    replica: Any, task: Any, done: Mapping[int, Any]
) -> tuple[int, str, str] | None:
    """Find the first of a device's shards whose gradient is not finite, and name the parameter.

    Args:
        replica: the model on the device.
        task: the task that all shards of the step share.
        done: results of shards that were already recomputed.
    """
    batch = task.batch
    replica.start_step(task)
    try:
        for shard in batch.shares.shards_of(replica.number):
            if shard not in batch.shards:
                continue
            gradients = (done.get(shard) or replica.compute(shard, task)).gradients
            for name, gradient in zip(replica.parts.trained, gradients, strict=True):
                if gradient is not None and not all_finite(gradient):
                    where = f"step {task.step}, shard {shard} ({batch.describe(shard)})"
                    return shard, name, where
    finally:
        replica.end()
    return None


def refuse_gradients(
    names: Sequence[str], gradients: Sequence[torch.Tensor | None], where: str
) -> None:
    """Refuse gradients that an inner backward of the loss left.

    Raises:
        GradientError: a gradient is not zero.
    """
    # zero_grad(set_to_none=False) leaves zeros, which are harmless. Detecting zeros blocks on the
    # GPU, but only if the loss called backward itself.
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and bool(gradient.count_nonzero()):
            raise GradientError(
                f"{where}: the loss function called backward and left a gradient in {name}.grad. "
                f"This gradient would be added once per shard, so the result would depend on the "
                f"number of shards. Call model.zero_grad() before returning, or use "
                f"torch.autograd.grad"
            )


def advice_on(
    error: Exception,
    *,
    samples: int,
    shards: int,
    loss: Callable[..., Any] | None = None,
    module: torch.nn.Module | None = None,
    payload: object = None,
) -> str:
    """Return advice on an error of a shard; empty if PyTorch's message suffices.

    Args:
        error: the exception.
        samples: number of samples in the shard.
        shards: number of shards per batch.
        loss: the user's loss function.
        module: the model.
        payload: the shard's part of the batch, as passed to the loss.
    """
    text = message_of(error)
    parameters = [*module.parameters()] if module is not None else []
    # The loss has no gradient although nothing is wrong with it: the first run of a gathering loss.
    if "does not require grad" in text and not any(p.requires_grad for p in parameters):
        return _FROZEN
    if advice := _on_arguments(error, text, loss, module) or _on_payload(
        error, text, payload, {p.dtype for p in parameters}
    ):
        return advice
    # Memory, by type or text: cuBLAS and the CPU allocator raise plain RuntimeErrors.
    if is_shortage(error):
        return (
            f"a shard of {samples} sample{'' if samples == 1 else 's'} does not fit into memory. "
            'Run it in microbatches with Trainer(microbatch="auto") or a number of samples; or use '
            f"more than {shards} shards, a smaller batch_size or a lower precision. Each of these "
            f"changes the result. Or find out what else uses memory on this device"
        )
    # cuBLAS reads the variable at its first use, so setting it later has no effect.
    if "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            "onefold sets this variable, but cuBLAS was used before Trainer was created. Create "
            "Trainer before any computation on a GPU, or set the variable before the script starts"
        )
    if "does not have a deterministic implementation" in text:
        return (
            "onefold allows only kernels that repeat their bits. Trainer(deterministic=False) "
            "allows the others: results then differ by rounding, even between two identical runs"
        )
    # The error of nn.Bilinear under autocast names neither the layer nor autocast.
    if "got input1:" in text and "weight: float" in text:
        return (
            "autocast does not support nn.Bilinear, which then gets low-precision activations and "
            "a float32 weight. Compute it in float32, `with torch.autocast(x.device.type, "
            "enabled=False): bilinear(x.float(), y.float())`, or entirely in low precision, with "
            'precision="bf16-params"'
        )
    if samples == 1 and "more than 1 value per channel" in text:
        return (
            "Batch norm needs two or more samples in each shard, and this shard has one. If the "
            "batch is the last, smaller one of a pass, leave it out with drop_last=True of the "
            "loader. Otherwise use larger batches, fewer shards (both change the result), or "
            "onefold.SyncBatchNorm, which needs two samples in the whole batch"
        )
    if is_about_hooks(error):
        return (
            "--placement partition gathers parameters during backward by saved-tensor hooks if "
            "devices share no memory, and torch.func does not allow these hooks. Use "
            "torch.autograd.grad in the loss, or --placement replicate"
        )
    return ""


_BY_SAMPLES = (
    ". onefold weights a scalar by the shard's number of samples, not by its denominator, so the "
    "result is not the loss of the whole batch. Return onefold.losses.{function}(...) with the "
    "same arguments, which returns the total and its denominator"
)
_OF_MODEL = (
    ". If the model computes the loss, as in transformers, return onefold.Mean(model(**batch)"
    ".loss * n, n), where n counts the targets: (batch['labels'] != -100).sum(), with labels[:, "
    "1:] if the model shifts them (causal language models)"
)
_BY_NUMBER = (
    ", as reduction='mean' does. Return onefold.losses.{function}(...) with the same arguments but "
    "without reduction='none'; to divide by the number of samples, return "
    "onefold.Mean(losses.sum(), len(losses))"
)
FINDINGS: dict[str, str] = {
    "sum": (
        "a sum over the shard ({shown} with reduction='sum'). onefold reads a scalar as the mean "
        "over the shard's {samples}, so loss and gradient would be too small by a factor of the "
        "number of shards. Return onefold.losses.{function}(..., reduction='sum') or "
        "onefold.Sum(total) for a sum over the batch, or use reduction='none' for a mean"
    ),
    "maybe-sum": (
        "a scalar that is summed but not divided. onefold reads a scalar as the mean over the "
        "shard's {samples}; if this is a sum over them, loss and gradient are too small by a "
        "factor of the number of shards. Return onefold.Sum(total) for a sum over the batch, "
        "onefold.Mean(total, weight) for a mean, or one value per sample"
    ),
    "maybe-whole": (
        "a sum divided by {divided}; the batch has {batch} samples, and the shard {samples} of "
        "them. onefold reads a scalar as the mean over the shard; if {divided} is a count of the "
        "whole batch, loss and gradient are too small by a factor of the number of shards. In that "
        "case return onefold.Sum(loss), or divide by the number of samples passed to the loss"
    ),
    "tokens": (
        "{seen}, which is not a multiple of the shard's {samples} samples. onefold weights a "
        "scalar by the shard's number of samples, so a value counts more if its shard has fewer "
        "values. Return {losses}onefold.Mean(total, weight); the denominator is the sum of all "
        "weights in the batch"
    ),
    "weights": "a mean by class weights ({shown} with weight=)" + _BY_SAMPLES,
    "ignored": "a mean over targets, {ignored} of which are ignored ({shown})"
    + _BY_SAMPLES
    + _OF_MODEL,
    "mean-total": "onefold.Mean(total, weight) whose total is already a mean ({shown}), so it is "
    "divided by the weights twice. Models of transformers return a mean even if they are given "
    "num_items_in_batch, because many of them ignore it. Return onefold.Mean(mean * weight, "
    "weight), or compute the total with reduction='sum'",
    "weights-none": "one value per sample scaled by class weights ({shown} with weight=). onefold "
    "divides the values by the number of samples, not by the sum of their weights" + _BY_NUMBER,
    "ignored-none": "one value per sample with ignored targets among them ({shown}). onefold "
    "divides the values by the number of samples, not by the number of targets that are not ignored"
    + _BY_NUMBER,
}
"""Advice by kind of finding: the tensor according to its graph, how onefold reads it, and what to
return instead."""


def _on_arguments(error: Exception, text: str, loss: Any, module: object) -> str:
    """Advise on a loss with parameters (outputs, targets), called with the model and the batch."""
    kind = type(module).__name__
    if loss is None or not isinstance(error, TypeError | AttributeError):
        return ""
    names = [""]
    with suppress(ValueError):  # a function that has no signature
        names = [*inspect.signature(getattr(loss, "forward", loss)).parameters, ""]
    # Check the name of the function: an error of an inner call concerns other arguments.
    given = _ARGUMENTS.search(text) is not None and f"{_called(loss)}()" in text
    # PyTorch's message names the type that it got instead of a tensor: here, the model's.
    usual = len(names) > 2 and _OUTPUTS.search(names[0]) and _TARGETS.search(names[1])
    is_model = _NOT_A_MODEL.search(text) and re.search(rf"\b{re.escape(kind)}\b", text)
    if not (given or is_model or (usual and _NOT_A_MODEL.search(text))):
        return ""
    function = _function_of(loss)
    ours = f"onefold.losses.{function}" if hasattr(F, function) else _name_of(loss)
    wrapper = "loss" if ours != "loss" else "loss_of_batch"
    return (
        f"the loss is called with the model and the batch, here as {_name_of(loss)}({kind}, "
        f"batch). If it expects outputs and targets, wrap it in a function for Trainer:\n"
        f"    def {wrapper}(model, batch):\n"
        f"        inputs, targets = batch\n"
        f"        return {ours}(model(inputs), targets)"
    )


def _called(loss: Any) -> str:
    return str(getattr(loss, "__name__", f"{type(loss).__name__}.forward"))


def _name_of(loss: Any) -> str:
    name = _called(loss).removesuffix(".forward")
    return name if name.isidentifier() else "criterion"


def _function_of(loss: Any) -> str:
    """Return the name of PyTorch's function that a loss is, or that a loss class calls."""
    # CamelCase to snake_case: CrossEntropyLoss becomes cross_entropy_loss.
    words = re.sub("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", _name_of(loss)).lower()
    return _FUNCTIONS.get(words, words)


def _on_payload(
    error: Exception, text: str, payload: object, dtypes: Collection[torch.dtype]
) -> str:
    """Advise on strings in a batch, and on numbers whose dtype differs from the model's."""
    if isinstance(error, TypeError | AttributeError) and _NO_TENSOR.search(text):
        for path, leaf in _leaves(payload, "batch"):
            if isinstance(leaf, str):
                return (
                    f"{path} is the text {leaf[:40]!r}, which cannot become a tensor. Return "
                    f"numbers for labels from the data set, such as classes.index(label)"
                )
    if not isinstance(error, RuntimeError) or "type" not in text:
        return ""
    if re.search("(?i)expected .*type.* long", text):
        return "class numbers must be torch.int64: convert them in the data set by tensor.long()"
    for path, leaf in _leaves(payload, "batch"):
        kind = leaf.dtype if isinstance(leaf, torch.Tensor) else None
        named = _NAMES.get(kind) if kind else None
        if named and kind not in dtypes and re.search(rf"(?i)\b({named})\b|mixed dtype", text):
            way = "array.astype('float32') if it comes from NumPy, or tensor.float()"
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
    """Report a `Mean` whose total is already a mean, which would be divided twice.

    >>> outputs = torch.zeros(4, 2, requires_grad=True)
    >>> loss = torch.nn.functional.mse_loss(outputs, torch.ones(4, 2))
    >>> inspect_totals(Mean(loss, 4)).kind
    'mean-total'
    >>> inspect_totals(Mean(loss * 4, 4))
    """
    for term in getattr(result, "terms", (result,)):
        # Pass a huge number of samples: no factor in the graph can then be mistaken for a count.
        graph = term.total.grad_fn if isinstance(term, Mean) and term.weight > 1 else None
        places = list(places_in(graph, 1 << 30, scalar=True)) if graph is not None else []
        if len(places) == 1 and places[0].divisor is None and not places[0].enlarged:
            function = LOSSES.get(places[0].node.name())
            if function and saved(places[0].node, "reduction") == 1:
                return finding_of("mean-total", function)
    return None


def say_partitioned(nbytes: int, *, small: bool) -> None:
    """Warn that ``replicate:state`` acts as ``replicate`` for this model, and why.

    Args:
        nbytes: size of the trained parameters, in bytes.
        small: whether the model is too small for ``replicate:state``.
    """
    _log.warning(
        "replicate:state acts as replicate for this model, so each device updates a part: %s",
        f"its trained parameters have {nbytes / 2**20:.2g} MiB, and at least 4 are required"
        if small
        else "its optimizer may use all parameters together, or updates float32 copies",
    )


_LOW = {torch.bfloat16, torch.float16}


def check_dtypes(optimizer: torch.optim.SGD | torch.optim.Adafactor) -> None:
    """Refuse an optimizer whose groups have dtypes that make its bits depend on the partition."""
    (_check_lists if isinstance(optimizer, torch.optim.SGD) else _check_adafactor)(optimizer)


def _check_lists(optimizer: torch.optim.Optimizer) -> None:
    """Refuse foreach kernels for low-precision parameters on a CPU."""
    # foreach kernels round differently from single-tensor ones. SGD uses the latter while any
    # parameter of the step() call lacks momentum, which depends on the segments of its device.
    for number, group in enumerate(optimizer.param_groups):
        low = {p.dtype for p in group["params"] if p.device.type == "cpu"} & _LOW
        if group["foreach"] and group["momentum"] and low:
            raise ValueError(
                f"SGD: group {number} has foreach=True, momentum and parameters of "
                f"{', '.join(sorted(map(str, low)))} on a CPU, where PyTorch's foreach kernel "
                f"rounds differently and its use depends on the partition. Omit foreach; it gives "
                f"no speedup on a CPU"
            )


def _check_adafactor(optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups with several dtypes and the default eps, which depends on parameter order."""
    # PyTorch derives eps from the first parameter of a step() call and uses it for all others.
    # Which parameter comes first depends on the device's partition.
    for number, group in enumerate(optimizer.param_groups):
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["eps"][0] is None and len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"Adafactor: group {number} mixes {listed} and uses the default eps, which depends "
                f"on the first parameter updated and therefore on the device. Set eps, such as "
                f"(1e-7, 1e-3), or use one group per dtype"
            )


def refuse_per_sample(part: object) -> None:
    """Refuse a module or optimizer of Opacus, which keeps per-sample gradients.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{type(part).__name__} keeps per-sample gradients, but each device has only those of its "
        f"own shards, so noise and clipping would depend on the number of devices and the privacy "
        f"accounting would be wrong. Pass a plain module and optimizer; onefold does not support "
        f"differential privacy"
    )


COUNTED = (
    "the loss of %s is a scalar and counts as the mean of %d samples, but nothing that collate "
    "returned has that many rows. If collate leaves out samples, return one loss per sample as "
    "onefold.Mean(losses.sum(), len(losses)); if rows are not samples in this batch, ignore this "
    "warning"
)
"""Warning with two arguments: step and shard, and the number of samples."""


def uneven(batch: Any, length: int, where: str) -> str:
    """Explain why a scalar is not the mean of a batch whose parts are cut unevenly."""
    return (
        f"the loss of {where} is a scalar, read as the mean of the shard, but the batch has parts "
        f"of {batch.samples} and {length} samples, which {batch.shares.shards} shards cannot share "
        "in equal proportions. Return onefold.Mean(total, weight) for each term, or use sizes that "
        f"are multiples of {batch.shares.shards}"
    )
