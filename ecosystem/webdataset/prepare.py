"""Write the points as tar files of webdataset."""

import webdataset
from ecosystem.common import points

with webdataset.ShardWriter("points-%d.tar", maxcount=30) as writer:
    for index, (x, y) in enumerate(zip(*points(), strict=True)):
        writer.write({"__key__": f"{index:04d}", "x.npy": x.numpy(), "y.cls": int(y)})
