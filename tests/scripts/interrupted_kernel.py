"""Runs cells in a kernel, interrupts the one that prints "begun", and prints outputs as JSON."""

import json

from jupyter_client.manager import start_new_kernel

CELLS = [
    """import onefold, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square().mean(1), shards=2)
print("begun")
while True:
    trainer.step(torch.ones(8, 3))""",
    """steps = trainer.steps
step = trainer.step(torch.ones(8, 3))
(step.number == steps + 1, step)""",
]
manager, client = start_new_kernel(kernel_name="python3")
shown = []


def show(message):
    shown.append(message["content"])
    if shown[-1].get("text") == "begun\n":
        manager.interrupt_kernel()


try:
    for cell in CELLS:
        client.execute_interactive(cell, output_hook=show, timeout=300)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps(shown))
