"""A plain loop that logs to mlflow."""

import mlflow
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, points, report
from torch.utils.data import DataLoader, TensorDataset

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.start_run()
number = 0
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        number += 1
        mlflow.log_metric("train/loss", loss.item(), step=number)
mlflow.end_run()
report(model)
