"""In what one device of a run may differ from the others, and how that must be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.fuzz import data
from tests.fuzz.case import Case
from tests.fuzz.losses import score
from tests.fuzz.script import Script, scale

__all__ = ["DIFFERENCES", "Difference"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that one device does otherwise."""

    words: str
    """A pattern that every device's error holds; ``{who}`` stands for who differs."""
    settings: Callable[[Case], dict[str, Any]] | None = None
    """Other arguments of Trainer."""
    build: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None
    """Done to model and optimizer before Trainer is made."""
    before_step: Callable[[Script, object], object] | None = None
    """Done before a step with its batch; may return another batch."""
    possible: Callable[[Case], bool] = lambda case: True


def _own(case: Case) -> bool:
    return case.source == "own"


def _loaded(case: Case) -> bool:
    return case.source != "own"


def _plan(script: Script, batch: object) -> None:
    plan = list(script.trainer.plan)
    here, there = (0, 1) if plan[0] else (1, 0)
    move = 1 if plan[here] else -1
    plan[here], plan[there] = plan[here] - move, plan[there] + move
    if min(plan) < 0:
        plan = [sum(plan), *[0] * (len(plan) - 1)]
    script.trainer.plan = plan


def _can_move(case: Case) -> bool:
    """A batch of a loader has the plan of the moment in which it was read."""
    return case.source == "own" and case.plan is None and "plan" not in case.happens


def _rate(script: Script, batch: object) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.25


def _mode(script: Script, batch: object) -> None:
    script.model.head.train(not script.model.head.training)


def _frozen(script: Script, batch: object) -> None:
    weight = script.model.head.weight
    weight.requires_grad_(not weight.requires_grad)


def _scaled(script: Script, batch: object) -> None:
    scale(script.model, 0.5)


def _scaled_data(script: Script, batch: object) -> None:
    scale(script.model, 0.5, through_data=True)


def _buffer(script: Script, batch: object) -> None:
    for buffer in script.model.buffers():
        if buffer.is_floating_point() and buffer.numel():
            buffer.add_(1.0)


def _has_average(case: Case) -> bool:
    return any(trait.stateful for trait in case.traits) or "counting" in case.blocks


def _longer(script: Script, batch: object) -> object:
    fields = data.samples(len(data.read_fields(batch).y) + 1, script.case.torch_dtype, 1)
    return data.wrapped(fields, script.case.container)


def _other_values(script: Script, batch: object) -> object:
    fields = data.Fields(*map(torch.as_tensor, data.read_fields(batch)))
    return data.wrapped(fields._replace(x=fields.x + 1), script.case.container)


def _other_dtype(script: Script, batch: object) -> object:
    fields = data.Fields(*map(torch.as_tensor, data.read_fields(batch)))
    return data.wrapped(fields._replace(index=fields.index.int()), script.case.container)


def _data(script: Script) -> Any:
    return data.data_set(7, script.case.torch_dtype, 5, noisy=False)


def _evaluating(script: Script, batch: object) -> None:
    script.trainer.evaluate(score, _data(script), batch_size=4)


def _predicting(script: Script, batch: object) -> None:
    script.trainer.predict(lambda m, b: {"x": data.read_fields(b).x}, _data(script), batch_size=4)


def _meeting(script: Script, batch: object) -> None:
    script.trainer.barrier()


def _gathering(script: Script, batch: object) -> None:
    script.trainer.gather({"one": 1.0})


def _saving(script: Script, batch: object) -> None:
    script.trainer.save("/nowhere/at/all")


def _changing(script: Script, batch: object) -> None:
    with script.trainer.changing():
        pass


def _again(script: Script, batch: object) -> None:
    script.trainer.step(batch)


def _attribute(script: Script, batch: object) -> None:
    for part in script.model.modules():
        if isinstance(part, nn.Dropout | nn.AlphaDropout):
            part.p = 0.9


_CALL = r"{who} call(s)? .* while device 0 calls|device 0 calls|is in step"
_STEP = r"step \d+, trainer\.step: {who} "

DIFFERENCES: dict[str, Difference] = {
    "plan": Difference(words=_STEP + "has another plan", before_step=_plan, possible=_can_move),
    "rate": Difference(
        words=r"step \d+, trainer.step: the optimizer's settings of {who} .*differ",
        before_step=_rate,
    ),
    "mode": Difference(words=_STEP + "has modules in another mode", before_step=_mode),
    "frozen": Difference(words=_STEP + "has .*other frozen parameters", before_step=_frozen),
    "weights": Difference(words="changed since the call before, on {writer}", before_step=_scaled),
    "weights, data": Difference(
        words="changed since the call before, on {writer}", before_step=_scaled_data
    ),
    "buffer": Difference(
        words=_STEP + "has other parameters or buffers",
        before_step=_buffer,
        possible=_has_average,
    ),
    "batch size": Difference(
        words=_STEP + r"has \d+ samples and device 0 has \d+", before_step=_longer, possible=_own
    ),
    "batch": Difference(
        words=_STEP + "was given another batch", before_step=_other_values, possible=_own
    ),
    "batch dtype": Difference(
        words=_STEP + "was given another batch", before_step=_other_dtype, possible=_own
    ),
    "evaluate": Difference(words=_CALL, before_step=_evaluating),
    "predict": Difference(words=_CALL, before_step=_predicting),
    "barrier": Difference(words=_CALL, before_step=_meeting),
    "gather": Difference(words=_CALL, before_step=_gathering),
    "save": Difference(words=_CALL, before_step=_saving),
    "changing": Difference(words=_CALL, before_step=_changing),
    "step again": Difference(
        words="is in (step|pass)|another (batch|plan)|has .* samples|is at sample|calls|"
        "has a batch of",
        before_step=_again,
    ),
    "seed": Difference(
        words="seed is .* on device 0 and ", settings=lambda c: {"seed": c.seed + 1}
    ),
    "shards": Difference(
        words="shards is .* on device 0 and .* on device",
        settings=lambda case: {"shards": case.shards + 1, "plan": None},
        possible=lambda case: case.plan is None,
    ),
    "clip_norm": Difference(
        words="clip_norm is .* on device 0 and ", settings=lambda case: {"clip_norm": 0.125}
    ),
    "threads": Difference(words="the threads of a device is", settings=lambda case: {"threads": 2}),
    "deterministic": Difference(
        words="deterministic is .* on device 0", settings=lambda case: {"deterministic": False}
    ),
    "another rate": Difference(
        words="optimizer group 0 lr is .* on device 0",
        build=lambda m, o: o.param_groups[0].update(lr=0.123),
    ),
    "another parameter": Difference(
        words="parameter more is .*absent",
        build=lambda m, o: m.register_parameter("more", nn.Parameter(torch.zeros(2))),
    ),
    "another buffer": Difference(
        words="buffer more is .*absent",
        build=lambda m, o: m.register_buffer("more", torch.zeros(2)),
        possible=lambda case: case.buffers is None,
    ),
    "dropout": Difference(
        words=_STEP + "has .*with other numbers",
        before_step=_attribute,
        possible=lambda case: "dropout" in " ".join(case.blocks).replace("reentrant-dropout", ""),
    ),
}


def who_differs(case: Case) -> tuple[str, str]:
    """Patterns for who differs from device 0, and for who wrote to the weights."""
    number, processes = case.difference_on, case.processes
    others = [str(each) for each in range(1, processes)] if number == 0 else [str(number)]
    who = f"devices? {', '.join(others)}"
    return who, rf"(device {number}|a device)\b"
