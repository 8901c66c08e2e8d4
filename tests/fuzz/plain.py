"""What a plain loop makes of the batches that one device was given, step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.core.flat import extent, storage_order
from onefold.core.randomness import derive_seed, kept_generators, seed_generators
from tests.fuzz.case import Case
from tests.fuzz.data import Fields
from tests.fuzz.losses import LOSSES, of_pytorch, value_of
from tests.fuzz.script import Observer, Script, bits_of, build, change, set_default_dtype
from tests.fuzz.shards import ShardByShard, last_round

__all__ = ["PlainLoop", "PlainSteps"]

_NEAR = 1e-10


class _Plain(Observer):
    """A model of its own, trained without onefold beside the one of a script."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.wrong: list[str] = []
        default = torch.get_default_dtype()
        set_default_dtype(case)
        self.model, self.optimizer, self.schedule = build(case)
        torch.set_default_dtype(default)
        self.loss = LOSSES[case.loss][0](self.model)

    def changed(self, event: str) -> None:
        change(self.model, self.optimizer, event)

    def _value(self, batch: Fields) -> torch.Tensor | None:
        return value_of(self.loss(self.model, batch))

    def _trained(self) -> list[nn.Parameter]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [p for p in self.model.parameters() if id(p) in held]

    def _clip(self) -> None:
        if self.case.clip_norm is None:
            return
        for p in self.model.parameters():
            if p.grad is not None:  # two that share memory would be scaled twice
                p.grad = p.grad.clone()
        nn.utils.clip_grad_norm_(self._trained(), self.case.clip_norm)

    def _differ(self, script: Script, what: str) -> None:
        mine, theirs = bits_of(self.model), bits_of(script.model)
        names = [name for name in mine if mine[name] != theirs[name]]
        if names:
            self.wrong.append(f"{script.where}: other bits than {what}: {', '.join(names)}")


class PlainLoop(_Plain):
    """For one shard: the very same steps, seeded alike; compares bits."""

    def after_step(self, script: Script, loss: float) -> None:
        if self.wrong:
            return
        (batch,) = script.shards_seen
        number = script.trainer.steps
        with kept_generators():
            seed = derive_seed("shard", self.case.seed, number, 0)
            value = self._value_of_pytorch(batch, seed)
            self.model.zero_grad()  # of all parameters: a step of onefold begins without gradients
            if value is not None and value.requires_grad:
                value.backward()
        if value is not None:
            self._clip()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self._look_at_loss(script, loss, float(value.detach()))
        self._differ(script, "a plain loop")

    def _value_of_pytorch(self, batch: Fields, seed: int) -> torch.Tensor | None:
        before = [buffer.clone() for buffer in self.model.buffers()]
        seed_generators(seed)
        with of_pytorch():
            value = self._value(batch)
        if value is None or not bool(value.isnan()):
            return value
        # A mean over nothing, which is left out: what counts beside it does.
        with torch.no_grad():
            for buffer, old in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(old)
        seed_generators(seed)
        return self._value(batch)

    def _look_at_loss(self, script: Script, ours: float, plain: float) -> None:
        near = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[self.case.dtype]
        if abs(ours - plain) > near * max(1.0, abs(plain)):
            self.wrong.append(f"{script.where}: loss {ours} and {plain} in a plain loop")


class PlainSteps(_Plain):
    """For several shards: each step by itself, from where the run is.

    The gradient of the whole batch must be the one that the optimizer was given; and what the
    optimizer made of that must have the bits of the same optimizer outside of onefold.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._given: dict[str, torch.Tensor] = {}

    def made(self, script: Script) -> None:
        script.optimizer.register_step_pre_hook(lambda *_: self._note_gradients(script))

    def before_step(self, script: Script) -> None:
        self._given = {}
        with torch.no_grad():
            pairs = [
                *zip(self.model.parameters(), script.model.parameters(), strict=True),
                *zip(self.model.buffers(), script.model.buffers(), strict=True),
            ]
            for mine, theirs in pairs:
                mine.copy_(theirs)
        groups = zip(self.optimizer.param_groups, script.optimizer.param_groups, strict=True)
        for mine, theirs in groups:
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def after_step(self, script: Script, loss: float) -> None:
        if self.wrong:
            return
        by_shard = ShardByShard(self.case, self.model, self.loss)
        by_shard.run(script)
        self.wrong += by_shard.wrong_buffers(script)
        if self.case.exact:
            self._look_at_gradients(script, loss)
        elif by_shard.gradients is not None:
            self._look_at_sums(script, by_shard.gradients)
        if "sliced" not in self.case.blocks:  # kernels may treat memory with gaps otherwise
            self._look_at_update(script)

    def _note_gradients(self, script: Script) -> None:
        """What the optimizer's tensors have, as one gradient a parameter.

        A large parameter is updated in pieces, which lie in its memory.
        """
        named = [(name, p, *extent(p)) for name, p in script.model.named_parameters() if p.numel()]
        named += [(name, p, 0, 0) for name, p in script.model.named_parameters() if not p.numel()]
        for piece in (p for group in script.optimizer.param_groups for p in group["params"]):
            if piece.grad is None:
                continue
            place = piece.data_ptr()
            name, whole, start = next(
                (name, p, start)
                for name, p, start, stop in named
                if piece is p or start <= place < stop
            )
            if piece is whole:
                self._given[name] = piece.grad.detach().clone()
                continue
            first = (place - start) // piece.element_size()
            room = self._given.setdefault(name, torch.zeros_like(whole))
            storage_order(room)[first : first + piece.numel()].copy_(piece.grad)

    def _look_at_gradients(self, script: Script, loss: float) -> None:
        batch = _joined(script.shards_seen, script.trainer.shards)
        with kept_generators():
            value = self._value(batch)
            self.optimizer.zero_grad()
            if value is None:
                if self._given:
                    self.wrong.append(f"{script.where}: updated where nothing counts")
                return
            if value.requires_grad:
                value.backward()
        self._clip()
        plain = float(value.detach())
        if abs(loss - plain) > _NEAR * max(1.0, abs(plain)):
            self.wrong.append(f"{script.where}: loss {loss}, and {plain} of the whole batch")
        held = {id(p) for p in self._trained()}
        for name, p in self.model.named_parameters():
            if id(p) in held:
                self._look_at_gradient(script, name, p.grad, self._given.get(name))

    def _look_at_sums(self, script: Script, sums: dict[str, torch.Tensor]) -> None:
        """The gradients of the shards by themselves, added up."""
        for name, p in self.model.named_parameters():
            p.grad = sums.get(name)
        self._clip()
        held = {id(p) for p in self._trained()}
        for name, p in self.model.named_parameters():
            if id(p) in held:
                self._look_at_gradient(script, name, p.grad, self._given.get(name))

    def _look_at_gradient(
        self, script: Script, name: str, plain: torch.Tensor | None, ours: torch.Tensor | None
    ) -> None:
        if plain is None or ours is None:
            nothing = ours is None and plain is not None and not plain.any()
            if plain is not ours and not (nothing and self.case.loss == "positives"):
                self.wrong.append(f"{script.where}: {name} has a gradient in one of two alone")
            return
        rough = self.case.dtype != "float64" or "single" in self.case.blocks
        near = 1e-4 if rough or plain.dtype != torch.float64 else _NEAR
        off = (plain - ours).abs().max().item() if plain.numel() else 0.0
        if off > near * max(1e-3, self._largest()):
            self.wrong.append(f"{script.where}: the gradient of {name} is off by {off}")

    def _largest(self) -> float:
        """Of all gradients: where some cancel each other out, rounding is of that size."""
        given = [g for g in self._given.values() if g.numel()]
        return max((float(g.abs().max()) for g in given), default=0.0)

    def _look_at_update(self, script: Script) -> None:
        for name, p in self.model.named_parameters():
            p.grad = self._given.get(name)
        if self._given:
            with torch.no_grad():
                for mine, theirs in zip(self.model.buffers(), script.model.buffers(), strict=True):
                    mine.copy_(theirs)
            self.optimizer.step()
            self._differ(script, "its optimizer outside of onefold")


def _joined(shards: list[Fields], number: int) -> Fields:
    """The whole batch from its shards; where a loss has several terms they were run twice."""
    columns: list[Any] = [torch.cat(column) for column in zip(*last_round(shards), strict=True)]
    return Fields(*columns)


def observer_of(case: Case) -> _Plain | None:
    """What can be compared for a case; None for nothing."""
    if case.shards > 1:
        return PlainSteps(case)
    return PlainLoop(case) if case.has_bits_of_plain else None
