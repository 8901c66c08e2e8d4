from __future__ import annotations

from typing import Any

from onefold.jobs.progress import epoch_line

PHASES = ("data", "forward", "backward", "exchange", "update")


def device(*seconds: float) -> dict[str, Any]:
    return {"device": "cpu", **dict(zip(PHASES, seconds, strict=True))}


def line(**changes: Any) -> dict[str, Any]:
    """A line of metrics, as a training writes one for each epoch."""
    scores = {"loss": 0.23456, "accuracy": 0.98765}
    times = {"lr": 0.04567, "train_s": 9.25, "evaluate_s": 0.5}
    devices = [device(1, 4, 3, 1, 1), device(2, 3, 3, 2, 0)]
    return {"epoch": 1, "loss": 0.1234, "scores": scores, **times, "devices": devices, **changes}


def test_an_epoch_is_told_in_one_line() -> None:
    assert epoch_line(line(), 30) == (
        "epoch  2/30  loss 0.1234  test loss 0.2346  accuracy 98.77%  lr 0.046  9.8 s  "
        "data 15%, computing 70%, exchange 15%"
    )
    assert epoch_line(line(), 9).startswith("epoch 2/9 ")
    assert epoch_line(line(), 100).startswith("epoch   2/100 ")
    told = epoch_line(line(loss=float("nan"), scores={"accuracy": float("nan")}), 3)
    assert "loss nan  accuracy nan%" in told
