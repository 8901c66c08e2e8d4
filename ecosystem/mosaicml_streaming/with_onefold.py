"""The script with onefold, which tells the stream the number of its pass."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, network, report
from streaming import StreamingDataset

import onefold


class Stream(StreamingDataset):
    def set_epoch(self, epoch):
        self.next_epoch = epoch


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


data = Stream(local="written", batch_size=BATCH, shuffle=True, num_canonical_nodes=1)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
