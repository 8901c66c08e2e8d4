"""The script with onefold, which seeds the augmentations of each sample."""

import albumentations
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, points, report
from torch.utils.data import Dataset

import onefold


class Pictures(Dataset):
    def __init__(self):
        self.pictures, self.labels = points()
        self.transform = albumentations.Compose(
            [albumentations.HorizontalFlip(p=0.5), albumentations.RandomBrightnessContrast(p=0.5)],
            seed=3,
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index].sigmoid().reshape(2, 4, 1).numpy()
        picture = self.transform(image=picture)["image"]
        return torch.from_numpy(picture.copy()).flatten(), self.labels[index]


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(Pictures(), batch_size=BATCH, shuffle=True)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
