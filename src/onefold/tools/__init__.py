"""Tools around the steps of a run, one module or package each; `registry` has the list of all."""

__all__: list[str] = []
