"""Where things lie: the model, the board, the state of the optimizer, random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import onefold
from tests.gpu.device import DEVICE, ON_GPU, cards, each, needs
from tests.gpu.net import Net, adamw, batches, loss, result, trainer_of
from tests.inside import engine_in

HERE = torch.device(DEVICE)


def test_a_script_that_names_no_device_gets_the_card() -> None:
    needs(ON_GPU, "a GPU")
    model = Net()
    trainer = onefold.Trainer(model, adamw(model), loss, shards=4)
    assert [device.type for device in trainer.devices] == ["cuda"]
    assert all(p.is_cuda for p in model.parameters())
    moved = Net().to(DEVICE)
    assert onefold.Trainer(moved, adamw(moved), loss, shards=4).devices == (HERE,)


@each("fused", [False, True])
def test_an_optimizer_that_has_worked_brings_its_state(fused: bool) -> None:
    """Where it was made, and whether its count of steps lies on the card, is of no matter."""
    steps = batches(3)
    found = set()
    for devices in (1, 2):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = Net().eval().to(DEVICE)
        optimizer = adamw(model, fused=fused)
        images, labels = (tensor.to(DEVICE) for tensor in steps[0])
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer = onefold.Trainer(
            model, optimizer, loss, shards=4, devices=[DEVICE] * devices, threads=1
        )
        model.train()
        found.add(result(trainer, steps[1:]))
    assert len(found) == 1


@each("devices", [1, 2])
def test_what_devices_compute_lies_on_the_first_of_them(devices: int) -> None:
    trainer = trainer_of(devices)
    board = engine_in(trainer).exchange.board
    assert board.totals.device.type == board.rows_memory.device.type == HERE.type
    assert board.on_host != ON_GPU
    kept = [trainer.step(batch) for batch in batches(4)]
    first = [float(step.loss) for step in kept]
    assert kept[0].loss.device.type == HERE.type
    # The board has been written over since.
    assert [float(step.loss) for step in kept] == first
    assert len(set(first)) == 4


def test_the_scripts_own_random_numbers_are_left_alone() -> None:
    trainer = trainer_of(2)
    torch.manual_seed(5)
    expected = torch.rand(4, device=DEVICE).tolist(), torch.rand(4).tolist()
    torch.manual_seed(5)
    trainer.step(batches(1)[0])
    assert (torch.rand(4, device=DEVICE).tolist(), torch.rand(4).tolist()) == expected


def test_batches_may_lie_anywhere() -> None:
    """Slices of a batch on the card begin where its copies do not."""
    steps = batches(4, samples=19)
    on_card = [(images.to(DEVICE), labels.to(DEVICE)) for images, labels in steps]
    found = {result(trainer_of(2), each_steps) for each_steps in (steps, on_card)}
    assert len(found) == 1


def test_the_model_stays_the_scripts_own_between_steps() -> None:
    trainer = trainer_of(2)
    trainer.step(batches(1)[0])
    state = trainer.model.state_dict()
    assert all(value.device.type == HERE.type for value in state.values())
    with torch.no_grad():
        trainer.model.get_parameter("out.bias").add_(1.0)
    trainer.step(batches(2)[1])
    biases = [r.trained.views[-1].clone() for r in engine_in(trainer).replicas]
    assert torch.equal(*biases)


def test_two_cards_have_the_bits_of_one() -> None:
    needs(cards() > 1, "two GPUs")
    steps = batches(6)
    found = {result(trainer_of(1), steps)}
    for on_card in (steps, batches(6, device="cuda:0")):
        torch.manual_seed(0)
        model = Net()
        two = ["cuda:0", "cuda:1"]
        trainer = onefold.Trainer(model, adamw(model), loss, shards=4, devices=two, threads=1)
        found.add(result(trainer, on_card))
    assert len(found) == 1
