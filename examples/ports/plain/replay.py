"""The plain loop of ../replay.py, on one device."""

import os

import torch
import torch.nn.functional as F
from torch import nn

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
    return (weight * each).mean(), {"td": (wanted - said).detach()}


def main(steps=120, checkpoint=None):
    torch.manual_seed(0)
    models = nn.ModuleDict({"online": make_model(), "target": make_model().requires_grad_(False)})
    models["target"].load_state_dict(models["online"].state_dict())
    optimizer = torch.optim.Adam(models["online"].parameters(), lr=0.01)
    corridor, replay = Corridor(), Replay()
    done = 0
    if checkpoint and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        models.load_state_dict(saved["models"])
        optimizer.load_state_dict(saved["optimizer"])
        corridor.cell = saved["cell"]
        replay.load(saved["replay"])
        done = saved["steps"]
    for number in range(done + 1, steps + 1):
        for _ in range(4 if replay.kept else BATCH):
            cell = corridor.cell
            with torch.no_grad():
                action = int(models["online"](torch.tensor([cell])).argmax())
            if torch.rand(()) < 0.3:
                action = int(torch.randint(2, ()))
            replay.add((cell, action, *corridor.step(action)))
        places, batch = replay.draw()
        optimizer.zero_grad()
        total, outputs = loss(models, batch)
        total.backward()
        optimizer.step()
        replay.note(places, outputs["td"])
        if number % 10 == 0:
            models["target"].load_state_dict(models["online"].state_dict())
            if checkpoint:
                state = {"models": models.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"cell": corridor.cell, "replay": replay.state(), "steps": number}
                torch.save(state, checkpoint)
        if number % 10 == 0:
            print(f"step {number}: loss {total:.4f}")
    return models


if __name__ == "__main__":
    main()
