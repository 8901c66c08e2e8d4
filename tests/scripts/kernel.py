"""Trains a small network on 1, 2 and 3 devices, and refuses modules outside the kernel.

With RANK in the environment it is one process of several, which take part in one run. Prints a JSON
object by number of devices: fingerprints, and the modules imported so far, with their files.
"""

import hashlib
import importlib.abc
import json
import os
import sys

REFUSED: tuple[str, ...] = (
    *("cli", "files", "integrations", "testing", "weights", "losses", "record"),
    *("checkpoint", "passes", "worker", "core.gathering", "core.values"),
    *("data_order.from_pytorch", "data_order.stream", "data_order.worker_processes"),
    *("deferred.recording", "deferred.values", "exchange.collective"),
    *("exchange.collective_memory", "launcher.devices", "launcher.launch", "launcher.workers"),
    *("placement.distribute", "placement.footprint"),
    *("placement.parameters", "placement.partitioned", "placement.pipeline"),
    *("placement.stage_buffers", "session.build", "session.data_calls"),
    *("session.script_updates", "shard.advice", "shard.compiling", "shard.gather"),
    *(
        "shard.left_state",
        "shard.operations",
        "shard.stage_modules",
        "step.joint",
        "step.microbatch",
        "system.background",
    ),
    *("system.caches", "system.output", "system.tensor_file"),
    *("tools", "update.state", "watch.timeline"),
)
"""Packages and modules below onefold that a plain run must do without."""
NEEDED: tuple[str, ...] = ("tools", "tools.registry", "tools.step_calls", "tools.checkpoints")
"""Those of them that every run has: the list of tools, and two of them."""
WITH_OTHERS = (
    *("exchange.connections", "exchange.group", "exchange.mailbox", "exchange.others"),
    *("exchange.shared", "launcher.foreign_launchers"),
)
"""What several processes need in addition."""
FOR_HANGS = ("launcher.hang", "tools.host_watch", "tools.places")
"""Hang reports, which every run of several processes makes."""


class Refusing(importlib.abc.MetaPathFinder):
    """Raises if a module outside the kernel is imported, and names the line that asks for it."""

    def __init__(self) -> None:
        self._needed = NEEDED
        self._refused = REFUSED
        if "RANK" in os.environ:
            self._needed += (*WITH_OTHERS, *FOR_HANGS)
        else:
            self._refused += (*WITH_OTHERS, *FOR_HANGS)

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        own = name.removeprefix("onefold.")
        if own in self._needed or not any(f"{own}.".startswith(f"{n}.") for n in self._refused):
            return
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        where = f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}"
        raise ImportError(f"{name} is not part of the kernel, and is imported by {where}")


def imported() -> dict[str, str]:
    """Modules of onefold in this process, with their files."""
    own = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "onefold"}
    return {name: module.__file__ for name, module in own.items() if module.__file__}


def train(devices: int) -> str:
    """Train for three steps; return the fingerprint."""
    import torch

    import onefold

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().mean(dim=1)

    chosen = ["cpu"] * devices if "RANK" not in os.environ else None
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1, devices=chosen)
    for batch in trainer.loader(data, batch_size=11, shuffle=True):
        trainer.step(batch)
    trainer.close()
    values = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def main() -> None:
    """Train in each way, and print what was found."""
    for name in [name for name in sys.modules if name.split(".")[0] == "onefold"]:
        del sys.modules[name]  # this process may be forked from one that has it
    sys.meta_path.insert(0, Refusing())
    counts = [int(os.environ.get("WORLD_SIZE", 0))] if "RANK" in os.environ else [1, 2, 3]
    found: dict[int, str] = {}
    modules: dict[int, dict[str, str]] = {}
    for devices in counts:
        found[devices] = train(devices)
        modules[devices] = imported()
    print(json.dumps({"fingerprints": found, "modules": modules}))


if __name__ == "__main__":
    main()
