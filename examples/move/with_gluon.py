"""The task of with_onefold.py, with the Trainer of MXNet's Gluon.

python examples/move/with_gluon.py
"""

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn


def main(epochs=5):
    devices = [mx.gpu(n) for n in range(mx.context.num_gpus())] or [mx.cpu()]
    mx.random.seed(0)
    x = mx.nd.random.normal(shape=(2048, 2))
    data = gluon.data.ArrayDataset(x, x[:, 0] * x[:, 1] > 0)
    model = nn.HybridSequential()
    model.add(nn.Dense(32, activation="relu"), nn.Dense(2))
    model.initialize(mx.init.Xavier(), ctx=devices)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": 0.01})
    loader = gluon.data.DataLoader(data, batch_size=64, shuffle=True)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            xs = gluon.utils.split_and_load(x, devices)
            ys = gluon.utils.split_and_load(y, devices)
            with autograd.record():
                losses = [loss(model(x), y) for x, y in zip(xs, ys, strict=True)]
            for each in losses:
                each.backward()
            trainer.step(len(x))
            total += sum(float(each.sum().asscalar()) for each in losses) / len(x)
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
