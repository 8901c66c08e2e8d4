"""LeNet on MNIST with onefold: the script of ddp.py, for one or several devices.

    torchrun --nproc-per-node 2 examples/from_ddp/with_onefold.py --data DIR
    onefold run --devices 2 examples/from_ddp/with_onefold.py --data DIR
    python examples/from_ddp/with_onefold.py --data DIR

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


def train_epoch(trainer, loader):
    """Train for an epoch; return the mean loss over the samples."""
    total = samples = 0
    for batch in loader:
        step = trainer.step(batch)
        total += step.loss * step.samples
        samples += step.samples
    return float(total / samples)


def main():
    parser = argparse.ArgumentParser(description="LeNet on MNIST with onefold")
    parser.add_argument("--data", required=True, help="folder with the four IDX files of MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size")
    parser.add_argument("--lr", type=float, default=4e-3, help="initial learning rate")
    parser.add_argument("--output", default="lenet.pt", help="file for the trained weights")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=8, seed=0, scheduler=scheduler, scheduler_every="epoch"
    )
    train_loader = trainer.loader(
        mnist(options.data, train=True), batch_size=options.batch_size, shuffle=True
    )
    test_set = mnist(options.data, train=False)

    for epoch in trainer.epochs(options.epochs):
        train_loss = train_epoch(trainer, train_loader)
        scores = trainer.evaluate(score, test_set, batch_size=1000)
        if trainer.is_lead:
            print(
                f"epoch {epoch + 1}/{options.epochs}: train loss {train_loss:.4f}, "
                f"test loss {scores['loss']:.4f}, test accuracy {scores['accuracy']:.2%}"
            )

    if trainer.is_lead:
        torch.save(trainer.model.state_dict(), options.output)


if __name__ == "__main__":
    main()
