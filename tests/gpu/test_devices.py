"""Where things lie, and what stays the script's own: model, losses, batches, random numbers."""

import copy
from typing import Any

import torch
from torch.utils.data import TensorDataset

import onefold
from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from tests.gpu.device import DEVICE, KIND, ON_GPU, cards, needs
from tests.gpu.net import Batch, Net, adamw, batches, loss, result, trainer_of

HERE = torch.device(DEVICE)


def test_a_script_that_names_no_device_gets_the_card() -> None:
    needs(ON_GPU, "a GPU")
    model = Net()
    trainer = onefold.Trainer(model, adamw(model), loss, shards=4)
    assert [device.type for device in trainer.devices] == [KIND]
    assert all(p.device.type == KIND for p in model.parameters())
    moved = Net().to(DEVICE)
    assert onefold.Trainer(moved, adamw(moved), loss, shards=4).devices == (HERE,)


def test_the_scripts_own_random_numbers_are_left_alone() -> None:
    trainer = trainer_of(2)
    torch.manual_seed(5)
    expected = torch.rand(4, device=DEVICE).tolist(), torch.rand(4).tolist()
    torch.manual_seed(5)
    trainer.step(batches(1)[0])
    assert (torch.rand(4, device=DEVICE).tolist(), torch.rand(4).tolist()) == expected


def test_the_model_stays_the_scripts_own_between_steps() -> None:
    """What it changes there counts on all devices, and a fingerprint knows no kind of device."""
    found = set()
    for devices in (1, 2):
        trainer = trainer_of(devices)
        trainer.step(batches(1)[0])
        assert all(value.device.type == HERE.type for value in trainer.model.state_dict().values())
        with torch.no_grad():
            trainer.model.get_parameter("out.bias").add_(1.0)
        trainer.step(batches(2)[1])
        moved = copy.deepcopy(trainer.model).cpu()
        found |= {fingerprint_of(tensor_digests(named_tensors(moved))), trainer.fingerprint()}
    assert len(found) == 1


def test_workers_read_into_pinned_memory() -> None:
    trainer = trainer_of()
    data = TensorDataset(*batches(1, 90)[0])
    for workers in (0, 1):
        for batch in trainer.loader(data, batch_size=45, workers=workers):
            shards: list[Any] = [*batch.shards.values()]
            leaves = [leaf for shard in shards for leaf in shard]
            assert all(leaf.is_pinned() == (ON_GPU and workers > 0) for leaf in leaves)
            assert all(leaf.device.type == "cpu" for leaf in leaves)
    trainer.close()


def test_a_loss_that_names_no_number_computes_on_the_card_of_its_shard() -> None:
    needs(cards() > 1, "two GPUs")

    def with_own(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return loss(model, batch) * torch.ones((), device=KIND)

    both = [f"{KIND}:0", f"{KIND}:1"]
    found = [result(trainer_of(on=on, loss=with_own), batches(2)) for on in (both[:1], both)]
    assert found[0] == found[1]
