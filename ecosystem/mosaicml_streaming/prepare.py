"""Write the points as shards of mosaicml-streaming."""

from ecosystem.common import points
from streaming import MDSWriter

columns = {"x": "ndarray:float32:8", "y": "int"}
with MDSWriter(out="written", columns=columns, size_limit=1024) as writer:
    for x, y in zip(*points(), strict=True):
        writer.write({"x": x.numpy(), "y": y.item()})
