"""How devices trade gradients and parameters: one interface with three implementations."""

__all__: list[str] = []
