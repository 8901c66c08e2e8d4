"""Graphs of PyTorch Geometric, in a plain loop."""

import torch
import torch.nn.functional as F
from ecosystem.common import BATCH, EPOCHS, points, report
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(8, 16), torch.nn.Linear(16, 2)

    def forward(self, graphs):
        hidden = self.conv(graphs.x, graphs.edge_index).relu()
        return self.head(global_mean_pool(hidden, graphs.batch))


torch.manual_seed(0)
edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
data = [
    Data(x=x + torch.randn(4, 8), edge_index=edges, y=y) for x, y in zip(*points(), strict=True)
]
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=BATCH)
for _ in range(EPOCHS):
    for graphs in loader:
        loss = F.cross_entropy(model(graphs), graphs.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
