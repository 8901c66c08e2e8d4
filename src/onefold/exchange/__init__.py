"""How devices trade gradients and parameters: one interface, three ways."""

__all__: list[str] = []
