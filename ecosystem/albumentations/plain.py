"""Pictures with augmentations of albumentations, in a plain loop."""

import albumentations
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, Dataset


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


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
