"""A network learns the temperature from ten sensors. One of 80,000 readings is wrong.

onefold run --checkpoint runs/sensors --save-every 1000 examples/loss_jump.py
onefold why runs/sensors
"""

import torch

import onefold

READINGS, BATCH, BROKEN = 80_000, 16, 27_910

torch.manual_seed(0)
sensors = torch.randn(READINGS, 10)
temperatures = 20 + sensors @ torch.linspace(-1, 1, 10) + 0.1 * torch.randn(READINGS)
temperatures[BROKEN] = 2_031.0  # a lost decimal point

model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    sensors, temperatures = batch
    return (model(sensors)[:, 0] - temperatures).abs()


trainer = onefold.Trainer(model, optimizer, loss, shards=4)
data = torch.utils.data.TensorDataset(sensors, temperatures)
losses = 0.0
for batch in trainer.loader(data, batch_size=BATCH, shuffle=True):
    step = trainer.step(batch)
    losses += float(step.loss)
    if step.number % 500 == 0:
        print(f"step {step.number}: mean loss {losses / 500:.3f}")
        losses = 0.0
