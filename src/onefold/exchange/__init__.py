"""How devices trade gradients and parameters: one interface, three ways."""
