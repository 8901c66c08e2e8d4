"""A stream of litdata, in a plain loop."""

import litdata
import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, report

data = litdata.StreamingDataset("chunks", shuffle=False)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = litdata.StreamingDataLoader(data, batch_size=BATCH)
for _ in range(EPOCHS):
    for batch in loader:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
