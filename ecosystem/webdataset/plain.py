"""A shuffled stream of webdataset, in a plain loop."""

import torch
import torch.nn.functional as F
import webdataset
from ecosystem.common import BATCH, EPOCHS, network, report
from torch.utils.data import DataLoader

data = webdataset.WebDataset("points-{0..3}.tar", shardshuffle=False)
data = data.shuffle(30, seed=3).decode().to_tuple("x.npy", "y.cls")
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
