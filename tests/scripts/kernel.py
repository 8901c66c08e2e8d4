"""Trains a small network on 1, 2 and 3 devices, and refuses modules outside the kernel.

With RANK in the environment it is one process of several, which take part in one run. Prints a JSON
object by number of devices: fingerprints, and the modules imported so far, with their lines.
"""

import ast
import importlib.abc
import json
import os
import sys
from pathlib import Path

REFUSED = (
    *("cli", "integrations", "jobs", "testing", "weights", "losses", "record", "checkpoint"),
    "worker",
    *("placement.partitioned", "placement.offload", "placement.pipeline", "placement.parameters"),
    *(
        "placement.stage_buffers",
        "exchange.others",
        "exchange.collective_memory",
        "exchange.collective",
    ),
    *("step.joint", "step.rows", "step.microbatch", "shard.gather", "shard.compiling"),
    *("shard.operations", "shard.advice", "session.script_updates"),
    *("data_order.stream", "data_order.from_dataloader", "core.averaging"),
    *("passes.averaged", "passes.evaluation", "passes.modifying", "passes.statistics"),
    *("system.caches", "system.output", "watch.launches", "launcher.devices"),
    *("launcher.launch", "launcher.worker", "launcher.workers"),
    "tools",
)
"""Packages and modules below onefold that a plain run must do without."""
ALLOWED = ("tools.registry", "tools.step_calls", "tools.checkpoints")
"""Modules of these that it needs."""


class Refusing(importlib.abc.MetaPathFinder):
    """Raises if a module outside the kernel is imported, and names the line that asks for it."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        own = name.removeprefix("onefold.")
        if (
            own in ALLOWED
            or own == "tools"
            or not any(own == each or own.startswith(f"{each}.") for each in REFUSED)
        ):
            return
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        where = f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}"
        raise ImportError(f"{name} is not part of the kernel, and is imported by {where}")


def code_lines(path: Path) -> int:
    """Lines without docstrings, comments and empty lines."""
    text = path.read_text()
    explained: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            explained.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in explained
    )


def imported() -> dict[str, int]:
    """Modules of onefold in this process, with their lines of code."""
    own = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "onefold"}
    paths = {name: getattr(module, "__file__", None) for name, module in own.items()}
    return {name: code_lines(Path(path)) for name, path in paths.items() if path}


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
    found = trainer.fingerprint()
    trainer.close()
    return found


def main() -> None:
    """Train in each way, and print what was found."""
    for name in [name for name in sys.modules if name.split(".")[0] == "onefold"]:
        del sys.modules[name]  # this process may be forked from one that has it
    sys.meta_path.insert(0, Refusing())
    counts = [int(os.environ.get("WORLD_SIZE", 0))] if "RANK" in os.environ else [1, 2, 3]
    found: dict[int, str] = {}
    modules: dict[int, dict[str, int]] = {}
    for devices in counts:
        found[devices] = train(devices)
        modules[devices] = imported()
    print(json.dumps({"fingerprints": found, "modules": modules}))


main()
