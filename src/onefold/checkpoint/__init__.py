"""Saving and resuming a run: the files, the state in them, and who asks for them."""

__all__: list[str] = []
