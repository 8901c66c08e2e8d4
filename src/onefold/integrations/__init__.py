"""onefold inside of other libraries' training loops; each module needs the library of its name."""

__all__: list[str] = []
