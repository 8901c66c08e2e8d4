"""Captured shards have the bits of eager ones, and nothing that changes is frozen silently."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.shard import graphs
from onefold.shard.graphs import ShardGraphs
from tests.gpu.device import ON_GPU, each, needs
from tests.gpu.net import Batch, Net, batches, keeping, loss, sgd, trainer_of
from tests.gpu.test_waiting import masked, terms
from tests.inside import run_in

STEPS = 12
"""Three with costly checks, two eager, one that captures, one that compares, and replays."""


class Words(nn.Module):
    """Attention, and dropout in several places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(words)))
        return found


def of_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    words, following = batch
    losses = F.cross_entropy(model(words).flatten(0, 1), following.flatten(), reduction="none")
    return losses.view(following.shape).mean(1)


def texts(steps: int) -> list[Batch]:
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(0, 50, (steps, 2, 18, 8), generator=drawn)
    return [(first, second) for first, second in words]


def with_metrics(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
    logits = model(batch[0])
    weight = (batch[1] != 3).float().sum()
    found = F.cross_entropy(logits, batch[1], reduction="none")
    return found, {"right": logits.argmax(1) == batch[1], "mean": onefold.Mean(found.sum(), weight)}


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The warnings of onefold inside the block."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


Numbers = list[tuple[str, ...]]


def run(
    steps: Sequence[Any], before: Callable[[int], None] = lambda step: None, **options: Any
) -> tuple[str, Numbers, list[ShardGraphs]]:
    """Train, and return fingerprint, losses and norms to the last bit, and the graphs.

    Args:
        steps: the batches.
        before: called with the number of each step.
    """
    trainer = trainer_of(**options)
    numbers: Numbers = []
    for number, batch in enumerate(steps, 1):
        before(number)
        step = trainer.step(batch)
        values = [float(value).hex() for value in step.values.values()]
        numbers.append((float(step.loss).hex(), float(step.grad_norm).hex(), *values))
    found = trainer.fingerprint(), numbers
    replicas = run_in(trainer).engine.context.replicas
    trainer.close()
    return *found, [each.replay.__self__ for each in replicas if hasattr(each.replay, "__self__")]


CASES: dict[str, dict[str, Any]] = {
    **{f"{n} of {v}": {"shards": v, "devices": n} for v, n in ((1, 1), (2, 1), (7, 1), (8, 3))},
    "bf16": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params", "shards": 2},
    "fp16": {"precision": "fp16"},
    "words": {"model": Words, "loss": of_words, "data": texts(STEPS)},
    "words in bf16": {"model": Words, "loss": of_words, "data": texts(STEPS), "precision": "bf16"},
    "clipping": {"clip_norm": 0.1, "clip_value": 0.01},
    "momentum": {"optimizer": sgd},
    "microbatch": {"shards": 2, "microbatch": 4, "model": lambda: Net().eval()},
    "metrics": {"loss": with_metrics},
    "late weight": {"loss": masked},
    "late weight, one shard": {"loss": masked, "shards": 1},
    "short last batch": {"data": [*batches(5), *batches(1, 10)] * 4},
}


@each("case", sorted(CASES))
def test_captured_shards_have_the_bits_of_eager_ones(case: str) -> None:
    options = dict(CASES[case])
    steps = options.pop("data", batches(STEPS))
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        made = {"model": options["model"]()} if "model" in options else {}
        found.append(run(steps, **{**options, **made, "graphs": captures}))
    (eager, numbers, _), (captured, others, of_devices) = found
    assert (captured, others) == (eager, numbers)
    assert all(each_graphs.captures for each_graphs in of_devices)
    assert all(each_graphs.replays >= 3 for each_graphs in of_devices)
    assert len(of_devices) == (options.get("devices", 1) if ON_GPU else 0)


def test_losses_that_take_turns_are_captured() -> None:
    """Each has graphs of its own, and nothing changes between its steps."""
    needs(ON_GPU, "a GPU")
    found = []
    for captures in (False, True):
        losses = {"plain": loss, "half": lambda model, batch: loss(model, batch) / 2}
        with warnings() as said:
            trainer = trainer_of(loss=losses, graphs=captures)
            for batch in batches(STEPS):
                for name in losses:
                    trainer.step(batch, name)
        found.append(trainer.fingerprint())
        (replica,) = run_in(trainer).engine.context.replicas
        trainer.close()
        assert said == []
    assert found[0] == found[1]
    assert replica.replay.__self__.captures == 2 * 2  # for either size of a shard


class Checkpointed(Net):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, images, use_reentrant=False)
        return found


def counting(model: nn.Module, batch: Batch) -> torch.Tensor:
    counting.__dict__["calls"] = counting.__dict__.get("calls", 0) + 1
    return loss(model, batch)


def drawing(model: nn.Module, batch: Batch) -> torch.Tensor:
    return loss(model, batch) * float(np.random.rand())


class OwnGenerator:
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss(model, batch) * float(torch.rand((), generator=self.generator))


def gathering(model: nn.Module, batch: Batch) -> torch.Tensor:
    labels = onefold.gather(batch[1].float())
    return loss(model, batch) * labels.mean()


def reading(model: nn.Module, batch: Batch) -> torch.Tensor:
    losses = loss(model, batch)
    return losses * losses.detach().mean().item()


def hooked() -> Net:
    model = Net()
    model.out.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


EAGER: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("the loss gathers values", {"loss": gathering}),
    "hook": ("a parameter has a hook", {"model": hooked}),
    "terms": ("several denominators", {"loss": terms}),
    "numpy": ("draws from NumPy's generator", {"loss": drawing}),
    "own generator": ("draws from a generator of the script", {"loss": OwnGenerator()}),
    "wait": ("captur", {"loss": reading}),
    "count": ("changes between steps", {"loss": counting}),
}


@each("case", sorted(EAGER))
def test_what_cannot_be_captured_runs_eagerly_and_says_why(case: str) -> None:
    needs(ON_GPU, "a GPU")
    words, options = EAGER[case]
    found = []
    for captures in (False, True):
        counting.__dict__.pop("calls", None)
        torch.manual_seed(0)
        made = {"model": options["model"]()} if "model" in options else {}
        with warnings() as said:
            found.append(run(batches(STEPS), **{**options, **made}, graphs=captures))
    assert found[0][:2] == found[1][:2]
    (only,) = said
    assert words in only
    assert found[1][2][0].replays == 0


def test_checkpointed_layers_have_the_same_bits() -> None:
    """Captured or not: PyTorch reads the state of generators there, which CUDA refuses."""
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        found.append(run(batches(STEPS), model=Checkpointed(), graphs=captures)[:2])
    assert found[0] == found[1]


@each("placement", ["partition", "offload"])
def test_placements_that_gather_parameters_run_eagerly(placement: str) -> None:
    needs(ON_GPU, "a GPU")
    found = []
    with keeping(placement), warnings() as said:
        for captures in (False, True):
            found.append(run(batches(STEPS), devices=2, graphs=captures))
    assert found[0][:2] == found[1][:2]
    assert all("this placement gathers parameters" in each_said for each_said in said)
    assert len(said) == 2


class Scaled:
    """A loss with numbers of its own: in an attribute, and where no search finds them."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.hidden = np.ones(())

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss(model, batch) * self.factor * float(self.hidden)


Change = Callable[[Scaled, int], None]


def changed_run(change: Change, steps: int = 24, **options: Any) -> Any:
    """Train with a loss that is changed before each step."""
    scaled = Scaled()
    torch.manual_seed(0)
    with mock.patch.object(graphs, "COMPARED_EVERY", 10), warnings() as said:
        found = run(batches(steps), lambda step: change(scaled, step), loss=scaled, **options)
    return (*found, said)


def every_step(scaled: Scaled, step: int) -> None:
    scaled.factor = 1.0 + step / 16


def once(scaled: Scaled, step: int) -> None:
    scaled.factor = 1.0 + (step >= 10)


def hidden_every_step(scaled: Scaled, step: int) -> None:
    scaled.hidden[...] = 1.0 + step / 16


def hidden_once(scaled: Scaled, step: int) -> None:
    scaled.hidden[...] = 1.0 + (step >= 20)


def hidden_between(scaled: Scaled, step: int) -> None:
    scaled.hidden[...] = 1.0 + (step >= 18)


@each("change", [every_step, once, hidden_every_step, hidden_once])
def test_a_number_that_changes_is_not_frozen(change: Change) -> None:
    needs(ON_GPU, "a GPU")
    eager, captured = (changed_run(change, graphs=on) for on in (False, True))
    assert captured[:2] == eager[:2]
    (own,), said = captured[2:]
    if change is once:
        assert own.captures == 2 * 2  # for either size of a shard
        assert said == []
    elif change is every_step:
        assert not own.captures
        assert "changes between steps (from 1.25 to 1.3125)" in said[0]
    else:
        assert "the loss differs between the captured and the eager shard" in said[0]
        assert ("Steps 11 to 19 may have used" in said[0]) is (change is hidden_once)


def test_steps_with_an_unseen_change_are_named() -> None:
    """It is found in step 20; training goes on with the right numbers, on other parameters."""
    needs(ON_GPU, "a GPU")
    eager, captured = (changed_run(hidden_between, graphs=on) for on in (False, True))
    assert captured[1][:17] == eager[1][:17]
    assert captured[0] != eager[0]
    (said,) = captured[3]
    assert "Steps 11 to 19 may have used the old value" in said
    assert "load a checkpoint of step 10 or earlier" in said


def test_numbers_in_a_batch_are_part_of_the_key() -> None:
    needs(ON_GPU, "a GPU")

    def scaled(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return loss(model, (batch["x"], batch["y"])) * batch["factor"]

    steps = [
        {"x": x, "y": y, "factor": onefold.Broadcast(1.0 + (n > 7) + (n > 20) * n)}
        for n, (x, y) in enumerate(batches(26), 1)
    ]
    eager, captured = (run(steps, loss=scaled, graphs=on) for on in (False, True))
    assert captured[:2] == eager[:2]
    assert captured[2][0].captures == 4


# ---------------------------------------------------------------- defects that a comparison finds


def unseeded(self: ShardGraphs, *given: Any) -> Any:
    torch.get_device_module(self.replica.device).manual_seed_all(1)
    return original(self, *given)


def with_old_buffers(self: ShardGraphs, *given: Any) -> Any:
    self.replica.buffers.flat.sections[0].add_(0.5)
    return original(self, *given)


def with_old_samples(self: ShardGraphs, graph: Any, microbatch: Any, payload: Any) -> Any:
    return original(self, graph, microbatch, [0.5 * payload[0], payload[1]])


def beside_another(self: ShardGraphs, graph: Any, *given: Any) -> Any:
    """Replay another size between forward and backward, which overwrites the activations."""
    others = [each for each in self.graphs.values() if each is not None and each is not graph]
    replay = graph.backward.replay

    def both() -> None:
        for other in others:
            other.forward.replay()
            other.backward.replay()
        replay()

    with mock.patch.object(graph, "backward", mock.Mock(replay=both)):
        return original(self, graph, *given)


original = ShardGraphs.replay
DEFECTS: dict[str, tuple[Any, str]] = {
    "seed": (unseeded, "the loss"),
    "buffer": (with_old_buffers, "buffer batch_norm.running_mean"),
    "samples": (with_old_samples, "the loss"),
    "memory": (beside_another, "the gradient of conv.weight"),
}


@each("defect", sorted(DEFECTS))
def test_a_defect_of_a_replay_is_found_before_its_result_counts(defect: str) -> None:
    needs(ON_GPU, "a GPU")
    planted, name = DEFECTS[defect]
    eager = run(batches(STEPS))
    with mock.patch.object(ShardGraphs, "replay", planted), warnings() as said:
        found = run(batches(STEPS), graphs=True)
    assert found[:2] == eager[:2]
    (only,) = said
    assert f"graphs=True: {name} differs" in only


def test_a_wrong_key_is_found() -> None:
    """A loss scale that is no part of the key; it changes in step 8."""
    needs(ON_GPU, "a GPU")
    state_of = ShardGraphs.state_of

    def without_scale(self: ShardGraphs, task: Any) -> Any:
        first, _, *rest = state_of(self, task)
        return first, *rest

    def steep(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return loss(model, (batch[0], batch[1])) * batch[2]

    factors = [torch.full((18,), 1e4 if step == 8 else 1.0) for step in range(1, 13)]
    spoilt = [(*batch, factor) for batch, factor in zip(batches(12), factors, strict=True)]
    options: dict[str, Any] = {"precision": "fp16", "loss": steep}
    with mock.patch.object(graphs, "COMPARED_EVERY", 9):
        eager = run(spoilt, **options)
        with mock.patch.object(ShardGraphs, "state_of", without_scale), warnings() as said:
            found = run(spoilt, **options, graphs=True)
    assert eager[:2] == found[:2]
    assert "the gradient of" in said[0]
