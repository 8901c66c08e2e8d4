"""The stateful loader of torchdata, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = StatefulDataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
