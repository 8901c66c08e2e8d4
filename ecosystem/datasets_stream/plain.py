"""A shuffled stream of Hugging Face's datasets, in a plain loop."""

import datasets
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader

x, y = points()
data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")
data = data.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=30)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=BATCH)
for epoch in range(EPOCHS):
    data.set_epoch(epoch)
    for batch in loader:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
