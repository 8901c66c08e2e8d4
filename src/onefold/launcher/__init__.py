"""Starts the processes of a run and watches them; imports no PyTorch."""

__all__: list[str] = []
