"""Trains train.py on four workers of Ray Train. In the folder of train.py: python ray_train.py

If a worker dies, or a node is preempted, Ray restarts all workers, and the run resumes from the
last checkpoint. Ray announces nothing to a worker, so save often. If this program itself ends,
start it again: it resumes as well.
"""

import secrets

import ray
import ray.train
import train
from ray.train.torch import TorchTrainer

variables = {
    "ONEFOLD_CHECKPOINT": "/shared/runs/a",  # a folder that all nodes see
    "ONEFOLD_SAVE_EVERY": "5m",
    "ONEFOLD_SECRET": secrets.token_hex(16),  # keeps strangers out of the run
    "PYTHONHASHSEED": "0",  # sets of strings have the same order in every process
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # or Ray repeats output that a resumed run holds back
}


if __name__ == "__main__":
    ray.init(runtime_env={"env_vars": variables, "working_dir": "."})
    TorchTrainer(
        train.main,
        scaling_config=ray.train.ScalingConfig(num_workers=4, use_gpu=True),
        run_config=ray.train.RunConfig(
            storage_path="/shared/ray",
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
