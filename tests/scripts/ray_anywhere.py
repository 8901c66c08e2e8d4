"""Calls ``stopped_anywhere.py`` in two workers of Ray Train, which may be killed."""

import runpy
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer

SCRIPT = str(Path(__file__).with_name("stopped_anywhere.py"))


def train() -> None:
    runpy.run_path(SCRIPT)


if __name__ == "__main__":
    # A short path, as Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=temporary)
        try:
            TorchTrainer(
                train,
                scaling_config=ray.train.ScalingConfig(num_workers=2),
                run_config=ray.train.RunConfig(storage_path=f"{temporary}/runs"),
            ).fit()
        finally:
            ray.shutdown()
