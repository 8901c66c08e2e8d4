"""The commands of the jobs, built from their options."""

__all__: list[str] = []
