"""The plain loop of ../pool.py, on one device."""

import os

import torch
import torch.nn.functional as F
from torch import nn

SIZE, BATCH, ROOM = 160, 16, 24


def make_strokes(slanted, seed):
    """Make strokes that are upright or slanted: (SIZE, 1, 12, 12) float32, -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    shift = 3 + 6 * torch.rand(SIZE, 1, 1, generator=generator)
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    middle = shift + (0.5 * (row - 5.5) if slanted else 0.0)
    return (2.0 - (column - middle).abs()).clamp(-1, 1).unsqueeze(1)


def make_translator():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_judge():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 3),
        nn.Flatten(0),
    )


class Pool:
    """Pool of earlier images: half of the requested images are exchanged with it."""

    def __init__(self):
        self.kept = []

    def state(self):
        return [picture.tolist() for picture in self.kept]

    def load(self, state):
        self.kept = [torch.tensor(picture) for picture in state]

    def exchange(self, pictures):
        given = []
        for picture in pictures:
            if len(self.kept) < ROOM:
                self.kept.append(picture)
                given.append(picture)
            elif torch.rand(()) < 0.5:
                place = int(torch.randint(ROOM, ()))
                given.append(self.kept[place])
                self.kept[place] = picture
            else:
                given.append(picture)
        return torch.stack(given)


def translation_loss(models, batch):
    ours, _ = batch
    made = models["there"](ours)
    fooled = (models["judge"](made) - 1).square().mean()
    returned = F.l1_loss(models["back"](made), ours)
    return fooled + 5 * returned, {"made": made.detach()}


def judge_loss(models, batch):
    theirs, made = batch
    real, false = models["judge"](theirs), models["judge"](made)
    return (real - 1).square().mean() + false.square().mean()


def main(epochs=4, checkpoint=None):
    torch.manual_seed(0)
    models = {"there": make_translator(), "back": make_translator(), "judge": make_judge()}
    both = [*models["there"].parameters(), *models["back"].parameters()]
    optimizers = {
        "translation": torch.optim.Adam(both, lr=2e-3, betas=(0.5, 0.999)),
        "judge": torch.optim.Adam(models["judge"].parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }
    pairs = torch.utils.data.TensorDataset(make_strokes(False, 1), make_strokes(True, 2))
    loader = torch.utils.data.DataLoader(pairs, batch_size=BATCH, shuffle=True)
    pool = Pool()
    done = 0
    if checkpoint and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        for name, state in saved["models"].items():
            models[name].load_state_dict(state)
        for name, state in saved["optimizers"].items():
            optimizers[name].load_state_dict(state)
        pool.load(saved["pool"])
        done = saved["epochs"]
    for epoch in range(done, epochs):
        for batch in loader:
            optimizers["translation"].zero_grad()
            moved, outputs = translation_loss(models, batch)
            moved.backward()
            optimizers["translation"].step()
            optimizers["judge"].zero_grad()
            judged = judge_loss(models, (batch[1], pool.exchange(outputs["made"])))
            judged.backward()
            optimizers["judge"].step()
        print(f"epoch {epoch}: loss {moved:.4f} of translation, {judged:.4f} of the judge")
        if checkpoint:
            state = {"models": {name: each.state_dict() for name, each in models.items()}}
            state |= {"optimizers": {name: each.state_dict() for name, each in optimizers.items()}}
            torch.save(state | {"pool": pool.state(), "epochs": epoch + 1}, checkpoint)
    return models


if __name__ == "__main__":
    main()
