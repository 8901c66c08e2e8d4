"""ResNet-18 on small color pictures: real digits in the colors of a real photograph.

    onefold run --devices 2 examples/gallery/resnet18.py

Each digit inverts a random patch of a photograph, as in MNIST-M. Both are scikit-learn's.
Writes resnet18.png: pictures of the test set with what the network reads, errors in red.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits, load_sample_image
from torch import nn
from torch.utils.data import TensorDataset, random_split

import onefold

WIDTH, SIZE = 16, 16  # the original is 64 channels wide


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            conv = nn.Conv2d(before, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x):
        inside = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inside)) + self.shortcut(x)).relu()


def make_model():
    """Return ResNet-18 with the stem for small pictures: without stride and pooling."""
    layers = [nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    before = WIDTH
    for width, stride in ((WIDTH, 1), (2 * WIDTH, 2), (4 * WIDTH, 2), (8 * WIDTH, 2)):
        layers += [Block(before, width, stride), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def make_data(photo, seed):
    """Return pictures (n, 3, 16, 16) float32 and their digits (n,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, size=SIZE, mode="bilinear")
    pixels = torch.tensor(load_sample_image(photo)).permute(2, 0, 1) / 255
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(len(images), 2, generator=generator)
    corners = (places * (torch.tensor(pixels.shape[1:]) - SIZE)).long().tolist()
    patches = torch.stack([pixels[:, r : r + SIZE, c : c + SIZE] for r, c in corners])
    return TensorDataset((patches - images).abs(), torch.tensor(digits.target))


def loss(model, batch):
    images, labels = batch
    return onefold.losses.cross_entropy(model(images), labels)


def read(model, batch):
    return {"digit": model(batch[0]).argmax(dim=1)}


def draw(images, labels, found):
    figure, axes = plt.subplots(3, 9, figsize=(6.4, 2.7), layout="constrained")
    for n, axis in enumerate(axes.flat):
        axis.imshow(images[n].permute(1, 2, 0).numpy())
        axis.set_title(int(found[n]), color="black" if found[n] == labels[n] else "red", size=9)
        axis.axis("off")
    figure.savefig("resnet18.png")


def main(epochs=8):
    data = make_data("china.jpg", seed=1)
    train_set, test_set = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=2,  # batch norm sees 30 pictures at a time
        seed=0,
        threads=1,
        scheduler=scheduler,
        scheduler_every="epoch",
    )
    loader = trainer.loader(train_set, batch_size=60, shuffle=True)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
    found = trainer.predict(read, test_set, batch_size=99)["digit"]
    images, labels = test_set[:]
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"{(found == labels).sum()} of {len(labels)} digits are read correctly")
        print(f"fingerprint {fingerprint}")
        draw(images, labels, found)
    return fingerprint


if __name__ == "__main__":
    main()
