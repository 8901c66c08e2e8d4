"""Ready-made training jobs, written with nothing but the public interface."""

__all__: list[str] = []
