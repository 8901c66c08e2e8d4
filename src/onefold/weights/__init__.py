"""Weights that others saved, into a model of ours."""

__all__: list[str] = []
