"""Trains with two workers of Ray Train: ``with_ray.py FOLDER``, where it leaves the fingerprint."""

import sys
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer


def train(config: dict[str, str]) -> None:
    import placed  # beside this script, whose folder Ray's workers have on their path

    bits = placed.train()
    context = ray.train.get_context()
    Path(config["folder"], f"bits-{context.get_world_rank()}").write_text(bits)


if __name__ == "__main__":
    folder = sys.argv[1]
    # A short path, as Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=temporary)
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=f"{folder}/ray"),
        ).fit()
        ray.shutdown()
