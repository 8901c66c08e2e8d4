"""LeNet-5 from scratch on real digits: scikit-learn's 1,797 scans of 8x8 pixels.

    onefold run --devices 2 examples/gallery/lenet.py

Writes lenet.png: digits of the test set with what the network reads, errors first.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import onefold


def make_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, size=32, mode="bilinear")  # as LeNet expects
    data = TensorDataset(images, torch.tensor(digits.target))
    return random_split(data, [1500, 297], torch.Generator().manual_seed(0))


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def loss(model, batch):
    images, labels = batch
    return onefold.losses.cross_entropy(model(images), labels)


def read(model, batch):
    return {"digit": model(batch[0]).argmax(dim=1)}


def draw(images, labels, found):
    order = (found == labels).int().argsort(stable=True)
    figure, axes = plt.subplots(2, 9, figsize=(6.4, 1.8), layout="constrained")
    for n, axis in zip(order, axes.flat, strict=False):
        axis.imshow(images[n, 0].numpy(), cmap="gray")
        axis.set_title(int(found[n]), color="black" if found[n] == labels[n] else "red", size=9)
        axis.axis("off")
    figure.savefig("lenet.png")


def main(epochs=12):
    train_set, test_set = make_data()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0, threads=1)
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
