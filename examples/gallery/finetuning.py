"""Fine-tuning: a network for one kind of pictures learns another kind from 100 examples.

    onefold run --devices 2 examples/gallery/finetuning.py

The pictures, and the network, are those of resnet18.py, with the colors of two photographs.
Writes finetuning.png: the accuracy after each epoch, from pretrained and from random weights.
"""

import matplotlib.pyplot as plt
import torch
from resnet18 import loss, make_data, make_model
from torch.utils.data import Subset

import onefold


def score(model, batch):
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def train(model, train_set, test_set, lr, epochs):
    """Train; return the accuracy before training and after each epoch, in percent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
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
    loader = trainer.loader(train_set, batch_size=50, shuffle=True)
    accuracies = [trainer.evaluate(score, test_set, batch_size=100)["accuracy"]]
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
        accuracies.append(trainer.evaluate(score, test_set, batch_size=100)["accuracy"])
    return [100 * float(each) for each in accuracies], trainer


def draw(curves):
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for name, curve in curves.items():
        axis.plot(curve, marker=".", label=name)
    axis.set(
        xticks=range(0, len(curve), 5), xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100)
    )
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.savefig("finetuning.png")


def main(before=5, epochs=15):
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).tolist()
    plenty = Subset(make_data("china.jpg", seed=1), order[:1000])
    other = make_data("flower.jpg", seed=2)
    few, test_set = Subset(other, order[1000:1100]), Subset(other, order[1100:1400])
    torch.manual_seed(0)
    model, scratch = make_model(), make_model()
    train(model, plenty, few, 0.1, before)
    scratch_curve, _ = train(scratch, few, test_set, 0.1, epochs)
    curve, trainer = train(model, few, test_set, 0.03, epochs)
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"pretrained: {curve[0]:.1f}%, fine-tuned on 100 examples: {curve[-1]:.1f}%")
        print(f"from random weights: {scratch_curve[-1]:.1f}%")
        print(f"fingerprint {fingerprint}")
        draw({"fine-tuned": curve, "from random weights": scratch_curve})
    return fingerprint


if __name__ == "__main__":
    main()
