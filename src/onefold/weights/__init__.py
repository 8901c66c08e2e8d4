"""Reads weights that others have saved, without running code from the file.

`onefold.load_weights` is enough for most programs. These are its parts, for programs that name
layers or choose checkpoints themselves.

Example:
    >>> import pathlib, tempfile, torch
    >>> from onefold import weights
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.pth"
    >>> torch.save({"model": torch.nn.Linear(2, 1).state_dict()}, file)
    >>> sorted(weights.state_under(weights.read_weights(file), "model", file))
    ['bias', 'weight']
"""

from onefold.weights.file import best_scored, check_weights, read_weights, state_under
from onefold.weights.load import Loaded, bare_name, check_finite

__all__ = [
    "Loaded",
    "bare_name",
    "best_scored",
    "check_finite",
    "check_weights",
    "read_weights",
    "state_under",
]
