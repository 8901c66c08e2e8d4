"""Double Q-learning with prioritized replay: the loss returns the error of each sample.

Changes from the plain loop:

- The loss returns the errors as per-sample outputs; `step.outputs["td"]` has those of the
  whole batch, in order, on every device.
- The target network is copied inside `trainer.modifying`.
- The script owns play and replay, equal on all devices, and saves them with the run as ``extra``;
  their draws come from a generator that is seeded in each step.

    python examples/ports/replay.py
    onefold run --devices 2 examples/ports/replay.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

CELLS, ROOM, BATCH, DISCOUNT = 9, 512, 32, 0.9


class Corridor:
    """A walk along cells, left or right: the last cell gives 1 and ends, the first gives 0.1."""

    def __init__(self):
        self.cell = CELLS // 2

    def step(self, action):
        self.cell += 1 if action else -1
        ended = self.cell in (0, CELLS - 1)
        reward = {0: 0.1, CELLS - 1: 1.0}.get(self.cell, 0.0)
        after = self.cell
        if ended:
            self.cell = CELLS // 2
        return reward, after, ended


class Replay:
    """Stores transitions, and draws those with larger errors more often."""

    def __init__(self):
        self.kept = []
        self.priorities = torch.zeros(ROOM)

    def add(self, transition):
        place = len(self.kept) % ROOM
        self.kept.append(transition)
        self.priorities[place] = max(float(self.priorities.max()), 1.0)

    def state(self):
        return {"kept": self.kept, "priorities": self.priorities.tolist()}

    def load(self, state):
        self.kept = [tuple(each) for each in state["kept"]]
        self.priorities = torch.tensor(state["priorities"])

    def draw(self):
        chance = self.priorities[: len(self.kept)].pow(0.6)
        chance = chance / chance.sum()
        places = torch.multinomial(chance, BATCH, replacement=True)
        weight = (len(self.kept) * chance[places]).pow(-0.4)
        columns = zip(*(self.kept[place] for place in places.tolist()), strict=True)
        before, action, reward, after, ended = map(torch.tensor, columns)
        return places, (before, action, reward, after, ended, weight / weight.max())

    def note(self, places, errors):
        self.priorities[places] = errors.abs() + 1e-3


def make_model():
    return nn.Sequential(nn.Embedding(CELLS, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(models, batch):
    before, action, reward, after, ended, weight = batch
    said = models["online"](before).gather(1, action.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = models["online"](after).argmax(1, keepdim=True)
        value = models["target"](after).gather(1, best).squeeze(1)
        wanted = reward + DISCOUNT * value * ~ended
    each = F.smooth_l1_loss(said, wanted, reduction="none")
    return weight * each, {}, {"td": wanted - said}


def main(steps=120, checkpoint=None):
    torch.manual_seed(0)
    models = {"online": make_model(), "target": make_model().requires_grad_(False)}
    models["target"].load_state_dict(models["online"].state_dict())
    optimizer = torch.optim.Adam(models["online"].parameters(), lr=0.01)
    corridor, replay = Corridor(), Replay()
    trainer = onefold.Trainer(models, optimizer, loss, shards=4, seed=0)
    saved = trainer.load(checkpoint, if_any=True) if checkpoint else None
    if saved is not None:
        corridor.cell = saved.extra["cell"]
        replay.load(saved.extra["replay"])
    for number in range(trainer.steps + 1, steps + 1):
        torch.manual_seed(number)
        for _ in range(4 if replay.kept else BATCH):
            cell = corridor.cell
            with torch.no_grad():
                action = int(models["online"](torch.tensor([cell])).argmax())
            if torch.rand(()) < 0.3:
                action = int(torch.randint(2, ()))
            replay.add((cell, action, *corridor.step(action)))
        places, batch = replay.draw()
        step = trainer.step(batch)
        replay.note(places, step.outputs["td"])
        if number % 10 == 0:
            with trainer.modifying():
                models["target"].load_state_dict(models["online"].state_dict())
            if checkpoint:
                extra = {"cell": corridor.cell, "replay": replay.state()}
                trainer.save(checkpoint, extra=extra)
        if number % 10 == 0:
            print(f"step {number}: loss {step.loss:.4f}")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
