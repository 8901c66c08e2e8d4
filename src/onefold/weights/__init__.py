"""Loads weights that somebody else saved into a model of the user's."""

__all__: list[str] = []
