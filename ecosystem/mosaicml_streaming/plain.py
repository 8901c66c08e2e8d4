"""A shuffled stream of mosaicml-streaming, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, network, report
from streaming import StreamingDataLoader, StreamingDataset

data = StreamingDataset(local="written", batch_size=BATCH, shuffle=True, num_canonical_nodes=1)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = StreamingDataLoader(data, batch_size=BATCH)
for _ in range(EPOCHS):
    for batch in loader:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
