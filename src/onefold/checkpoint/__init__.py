"""Saving a run and going on from it: files, the state that they hold, and who asks for them."""

__all__: list[str] = []
