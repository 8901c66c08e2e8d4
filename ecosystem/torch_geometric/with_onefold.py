"""The script with onefold, which takes over the loader."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, SHARDS, points, report
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import onefold


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(8, 16), torch.nn.Linear(16, 2)

    def forward(self, graphs):
        hidden = self.conv(graphs.x, graphs.edge_index).relu()
        return self.head(global_mean_pool(hidden, graphs.batch))


def loss(model, graphs):
    return F.cross_entropy(model(graphs), graphs.y, reduction="none")


torch.manual_seed(0)
edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
data = [
    Data(x=x + torch.randn(4, 8), edge_index=edges, y=y) for x, y in zip(*points(), strict=True)
]
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(DataLoader(data, batch_size=BATCH))
for _ in trainer.epochs(EPOCHS):
    for graphs in loader:
        trainer.step(graphs)
report(model)
