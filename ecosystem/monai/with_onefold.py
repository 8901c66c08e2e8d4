"""The script with onefold: the transforms draw from its seed, sample by sample."""

import torch
from ecosystem.common import BATCH, EPOCHS, SHARDS, points, report
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised

import onefold


def loss(model, batch):
    return dice(model(batch["image"]), batch["mask"]).flatten(1).mean(dim=1)


x, y = points()
transform = Compose([RandFlipd(["image", "mask"], prob=0.5), RandGaussianNoised("image", prob=0.5)])
rows = [
    {
        "image": v.reshape(1, 8, 1) * torch.ones(8),
        "mask": (v > 0).float().reshape(1, 8, 1) * torch.ones(8),
    }
    for v in x
]
data = Dataset(rows, transform)
torch.manual_seed(0)
model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
dice = DiceLoss(sigmoid=True, reduction="none")
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(DataLoader(data, batch_size=BATCH, shuffle=True))
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
