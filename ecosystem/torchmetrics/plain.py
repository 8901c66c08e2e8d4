"""An accuracy of torchmetrics over each pass, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
accuracy, history = MulticlassAccuracy(num_classes=2), []
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.update(logits.detach(), y)
    history.append(accuracy.compute())
    accuracy.reset()
report(model, history)
