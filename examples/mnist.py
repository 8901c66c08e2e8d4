"""LeNet on MNIST: the same model on any number of devices.

    python examples/mnist.py --data DIR
    onefold run --devices 2 examples/mnist.py --data DIR
    torchrun --nproc-per-node 2 examples/mnist.py --data DIR

DIR holds the four files of MNIST: train-images-idx3-ubyte.gz and so on.
"""

import argparse

import torch

import onefold
from onefold_jobs.data import mnist
from onefold_jobs.models import LeNet


def loss(model, batch):
    images, labels = batch
    return onefold.losses.cross_entropy(model(images), labels)


def score(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": onefold.losses.cross_entropy(logits, labels),
        "accuracy": logits.argmax(dim=1) == labels,
    }


def parse_options():
    parser = argparse.ArgumentParser(description="LeNet on MNIST")
    parser.add_argument("--data", required=True, help="folder with the four IDX files of MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size")
    parser.add_argument("--lr", type=float, default=4e-3, help="initial learning rate")
    return parser.parse_args()


def main():
    options = parse_options()
    torch.manual_seed(0)
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=8, seed=0, scheduler=scheduler, scheduler_every="epoch"
    )
    train = trainer.loader(
        mnist(options.data, train=True), batch_size=options.batch_size, shuffle=True
    )
    test_set = mnist(options.data, train=False)
    for epoch in trainer.epochs(options.epochs):
        for batch in train:
            trainer.step(batch)
        scores = trainer.evaluate(score, test_set, batch_size=1000)
        if trainer.is_lead:
            print(
                f"epoch {epoch + 1}/{options.epochs}: test loss {scores['loss']:.4f}, "
                f"test accuracy {scores['accuracy']:.2%}"
            )
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"fingerprint {fingerprint}")


if __name__ == "__main__":
    main()
