"""Segmentation with transforms, network and loss of MONAI, in a plain loop."""

import torch
from ecosystem.common import BATCH, EPOCHS, points, report
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised

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
dice = DiceLoss(sigmoid=True)
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
for _ in range(EPOCHS):
    for batch in loader:
        loss = dice(model(batch["image"]), batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
