"""The 8-bit AdamW of torchao, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, points, report
from torch.utils.data import DataLoader, TensorDataset
from torchao.optim import AdamW8bit

torch.compiler.set_stance("force_eager")  # compiling takes longer than this run
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))
optimizer = AdamW8bit(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(*points()), batch_size=BATCH)
for _ in range(EPOCHS):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
