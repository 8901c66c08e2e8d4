"""A text classifier: which library's documentation is a sentence from?

    onefold run --devices 2 examples/gallery/text_classifier.py

The sentences are the first ones of the docstrings of Python, NumPy, PyTorch and Matplotlib.
Prints sentences of the test set, with the answer and its probability.
"""

import importlib
import inspect
import re
import textwrap

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import onefold

MODULES = {
    "Python": "argparse collections datetime email.message http.client logging math os pathlib "
    "random re shutil socket statistics string subprocess threading typing unittest zipfile",
    "NumPy": "numpy numpy.linalg numpy.fft numpy.random numpy.ma numpy.polynomial.chebyshev",
    "PyTorch": "torch torch.nn torch.nn.functional torch.optim torch.linalg torch.fft "
    "torch.distributions torch.utils.data torch.special",
    "Matplotlib": "matplotlib.pyplot matplotlib.axes matplotlib.figure matplotlib.colors "
    "matplotlib.ticker matplotlib.patches matplotlib.text matplotlib.lines",
}
LENGTH, PADDING = 24, 0


def sentences_of(name):
    """Return the first sentences of the docstrings of a module and of its classes' methods."""
    found = set()
    members = vars(importlib.import_module(name)).values()
    classes = [each for each in members if inspect.isclass(each)]
    for each in [*members, *(method for one in classes for method in vars(one).values())]:
        module = getattr(each, "__module__", None) or ""
        if callable(each) and module.startswith(name.partition(".")[0]):
            text = " ".join((inspect.getdoc(each) or "").split())
            found.add(re.split(r"\.\s|\.$", text)[0])
    return {text for text in found if re.match(r"[A-Z][a-z]+ ", text)}  # no signature


def make_data():
    """Return words (n, 24) int64, labels (n,), sentences, and the number of known words."""
    texts, labels = [], []
    for label, modules in enumerate(MODULES.values()):
        found = sorted(set().union(*(sentences_of(name) for name in modules.split())))
        found = [text for text in found if 5 <= len(text.split()) <= LENGTH]
        texts += found
        labels += [label] * len(found)
    split = [re.findall(r"[a-z]+|\S", text.lower())[:LENGTH] for text in texts]
    known = {word: n for n, word in enumerate(sorted({w for s in split for w in s}), 1)}
    words = torch.tensor([[known[w] for w in s] + [PADDING] * (LENGTH - len(s)) for s in split])
    return words, torch.tensor(labels), texts, len(known) + 1


class SentenceCNN(nn.Module):
    """Convolutions over two to four words, and the largest answer of each (Kim, 2014)."""

    def __init__(self, known, width=64):
        super().__init__()
        self.words = nn.Embedding(known, width, padding_idx=PADDING)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, n, padding=n - 1) for n in (2, 3, 4))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(3 * width, len(MODULES))

    def forward(self, words):
        x = self.words(words).transpose(1, 2)
        found = torch.cat([conv(x).relu().amax(dim=2) for conv in self.convs], dim=1)
        return self.head(self.dropout(found))


def loss(model, batch):
    words, labels = batch
    return onefold.losses.cross_entropy(model(words), labels)


def classify(model, batch):
    return {"chances": model(batch[0]).softmax(dim=1)}


def main(epochs=5):
    words, labels, texts, known = make_data()
    data = TensorDataset(words, labels)
    size = len(data) // 5
    train_set, test_set = random_split(
        data, [len(data) - size, size], torch.Generator().manual_seed(0)
    )
    torch.manual_seed(0)
    model = SentenceCNN(known)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=2, seed=0, threads=1)
    loader = trainer.loader(train_set, batch_size=50, shuffle=True)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
    chance, answer = trainer.predict(classify, test_set, batch_size=200)["chances"].max(dim=1)
    right = (answer == labels[test_set.indices]).float().mean()
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        for n in range(8):
            text = textwrap.shorten(texts[test_set.indices[n]], 64)
            print(f"{list(MODULES)[answer[n]]:10} {chance[n]:4.0%}  {text}")
        largest = labels.bincount().max() / len(labels)
        print(f"accuracy {right:.1%}, always the most frequent: {largest:.1%}")
        print(f"fingerprint {fingerprint}")
    return fingerprint


if __name__ == "__main__":
    main()
