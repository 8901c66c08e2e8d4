"""An average of the weights by torch_ema, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset
from torch_ema import ExponentialMovingAverage

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
average = ExponentialMovingAverage(model.parameters(), decay=0.95)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update()
report(model, average.shadow_params)
