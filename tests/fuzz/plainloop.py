"""Random runs beside the loop that everybody writes: ``python -m tests.fuzz --plain --cases 500``.

Model, loss, optimizer, hooks and changes between steps are those of a case. With one shard, losses,
parameters and buffers must have the bits of the plain loop, seeded alike; with more, in float64,
they must be its own to 1e-9.
"""

import torch
from torch import nn

import onefold
from onefold.core.randomness import derive_seed, kept_generators, seed_generators
from tests.fuzz.case import Case, Verdict
from tests.fuzz.losses import LOSSES, OF_PYTORCH, read_fields, value_of
from tests.fuzz.script import batch_of, build, bytes_of, change, settings_of

__all__ = ["judge_plain"]


class PlainLoop:
    """A model of its own, trained without onefold."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model, self.optimizer, self.scheduler = build(case)
        make = OF_PYTORCH.get(case.loss) or LOSSES[case.loss][0]
        self.loss = make(self.model)

    def step(self, batch: object, number: int) -> float | None:
        """The loss; None where nothing counts, and so nothing is updated."""
        with kept_generators():
            seed_generators(derive_seed("shard", self.case.seed, number, 0))
            fields = read_fields(batch)
            tensors = type(fields)(*map(torch.as_tensor, fields))
            value = value_of(self.loss(self.model, tensors))
            # Of all parameters: a step of onefold begins without gradients.
            self.model.zero_grad()
            if value is None or bool(value.isnan()):
                return None
            if value.requires_grad:
                value.backward()
        for p in self.model.parameters():
            if p.grad is not None:  # two that share memory would be changed twice
                p.grad = p.grad.clone()
        self._clip()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(value.detach())

    def _clip(self) -> None:
        if self.case.clip_norm is not None:
            held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            ordered = [p for p in self.model.parameters() if id(p) in held]
            nn.utils.clip_grad_norm_(ordered, self.case.clip_norm)


def judge_plain(case: Case) -> Verdict:
    """Run a case beside a plain loop."""
    verdict = Verdict(case, "to the bit" if case.shards == 1 else "in float64 to 1e-9")
    plain = PlainLoop(case)
    model, optimizer, scheduler = build(case)
    settings = settings_of(case, model, scheduler, case.devices)
    trainer = onefold.Trainer(model, optimizer, LOSSES[case.loss][0](model), **settings)
    try:
        for number in range(1, case.steps + 1):
            batch = batch_of(case, number)
            loss, expected = float(trainer.step(batch).loss), plain.step(batch, number)
            if expected is not None and abs(loss - expected) > 1e-5 * max(1.0, abs(expected)):
                verdict.wrong.append(f"step {number}: loss {loss!r}, in a plain loop {expected!r}")
            verdict.wrong += [f"step {number}: {name}" for name in _differing(case, model, plain)]
            if verdict.wrong:
                break
            for _, event in (each for each in case.events if each[0] == number):
                with trainer.modifying():
                    change(model, optimizer, event)
                change(plain.model, plain.optimizer, event)
    except Exception as error:
        verdict.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        trainer.close()
    return verdict


def _differing(case: Case, model: nn.Module, plain: PlainLoop) -> list[str]:
    """Names of what has other values than in the plain loop."""
    named = [*model.named_parameters(), *(model.named_buffers() if case.shards == 1 else ())]
    theirs = [*plain.model.parameters(), *plain.model.buffers()]
    return [
        f"other values in {name}"
        for (name, one), other in zip(named, theirs, strict=False)
        if not _same(one.detach(), other.detach(), exact=case.shards == 1)
    ]


def _same(one: torch.Tensor, other: torch.Tensor, *, exact: bool) -> bool:
    if exact or not one.numel():
        return bytes_of(one) == bytes_of(other)
    size = max(float(other.abs().max()), 1e-3)
    return float((one - other).abs().max()) <= 1e-9 * size
