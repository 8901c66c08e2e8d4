"""Random runs, each held against one device and against a plain loop; see `tests.fuzz.__main__`."""
