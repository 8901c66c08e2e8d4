"""A U-Net that finds handwriting in a photograph, pixel by pixel.

    onefold run --devices 2 examples/gallery/unet.py

Digits and photograph are real, scikit-learn's; where the digits are is drawn at random.
Writes unet.png: pictures of the test set, the true pixels, and those that the network finds.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits, load_sample_image
from torch import nn
from torch.utils.data import TensorDataset

import onefold

SIZE, SIDE, DIGITS = 48, 16, 3


def make_data(count, digits, seed):
    """Return pictures (n, 3, 48, 48) with three digits in each, and masks (n, 48, 48)."""
    photo = torch.tensor(load_sample_image("flower.jpg")).permute(2, 0, 1) / 255
    draw = torch.Generator().manual_seed(seed)
    pictures, masks = torch.empty(count, 3, SIZE, SIZE), torch.zeros(count, SIZE, SIZE)
    corners = torch.rand(count, 2, generator=draw) * (torch.tensor(photo.shape[1:]) - SIZE)
    for picture, mask, (row, column) in zip(pictures, masks, corners.long().tolist(), strict=True):
        picture.copy_(photo[:, row : row + SIZE, column : column + SIZE])
        for _ in range(DIGITS):
            r, c = torch.randint(SIZE - SIDE, (2,), generator=draw).tolist()
            digit = digits[torch.randint(len(digits), (), generator=draw)]
            color = torch.rand(3, 1, 1, generator=draw)
            part = picture[:, r : r + SIDE, c : c + SIDE]
            part.copy_(torch.lerp(part, color.expand_as(part), digit))
            mask[r : r + SIDE, c : c + SIDE].logical_or_(digit > 0.5)
    return TensorDataset(pictures, masks)


def pair(before, width):
    return nn.Sequential(
        nn.Conv2d(before, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.down = nn.ModuleList(pair(*each) for each in zip((3, *widths), widths, strict=False))
        steps = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in steps)
        self.join = nn.ModuleList(pair(2 * narrow, narrow) for _, narrow in steps)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x):
        kept = []
        for down in self.down:
            x = down(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for up, join, left in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), left], dim=1))
        return self.head(x).squeeze(1)


def loss(model, batch):
    pictures, masks = batch
    return onefold.losses.binary_cross_entropy_with_logits(model(pictures), masks)


def find(model, batch):
    return {"mask": model(batch[0]) > 0}


def draw(pictures, masks, found):
    """Write three rows: pictures, true masks, and masks that were found."""
    gray = [each.float().unsqueeze(1).expand_as(pictures) for each in (masks, found)]
    rows = [torch.cat(list(each[:8]), dim=2) for each in (pictures, *gray)]
    pixels = torch.cat(rows, dim=1).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    plt.imsave("unet.png", pixels.permute(1, 2, 0).numpy())


def main(epochs=6):
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    digits = nn.functional.interpolate(digits, size=SIDE, mode="bilinear").squeeze(1)
    train_set = make_data(600, digits[:1400], seed=1)
    test_set = make_data(100, digits[1400:], seed=2)
    torch.manual_seed(0)
    model = UNet(8, 16, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=2,
        seed=0,
        threads=1,
        scheduler=scheduler,
        scheduler_every="epoch",
    )
    loader = trainer.loader(train_set, batch_size=20, shuffle=True)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
    found = trainer.predict(find, test_set, batch_size=50)["mask"]
    pictures, masks = test_set[:]
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        both, either = (found & masks.bool()).sum(), (found | masks.bool()).sum()
        print(f"intersection over union {both / either:.2f}")
        print(f"fingerprint {fingerprint}")
        draw(pictures, masks, found)
    return fingerprint


if __name__ == "__main__":
    main()
