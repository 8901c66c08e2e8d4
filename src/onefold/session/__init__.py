"""A Trainer's part in a run."""

__all__: list[str] = []
