"""Write the points as chunks of litdata."""

import litdata
from ecosystem.common import SAMPLES, points


def sample(index):
    x, y = points()
    return {"x": x[index], "y": y[index]}


if __name__ == "__main__":
    litdata.optimize(sample, list(range(SAMPLES)), "chunks", num_workers=1, chunk_bytes="1KB")
