"""The optimizer of schedulefree, in a plain loop."""

import schedulefree
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

model = network()
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=5)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    optimizer.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.eval()
report(model)
