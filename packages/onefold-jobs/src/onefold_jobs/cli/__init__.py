"""The commands of the jobs, made from their options."""

__all__: list[str] = []
