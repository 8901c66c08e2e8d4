"""Private training with opacus, in a plain loop."""

import opacus
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
model, optimizer, loader = opacus.PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
