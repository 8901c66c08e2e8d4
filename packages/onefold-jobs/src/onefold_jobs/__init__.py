"""Ready-made training jobs, written with only the public interface of onefold.

The jobs load PyTorch, so they are imported on first access.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from onefold.errors import LaunchError

if TYPE_CHECKING:
    from onefold_jobs.catalog import JobResult, LoadedRun, classify, load_run, segment, text

__all__ = ["JobResult", "LoadedRun", "classify", "load_run", "require", "segment", "text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'onefold_jobs' has no attribute {name!r}")
    return getattr(importlib.import_module("onefold_jobs.catalog"), name)


def require(what: str, extra: str, *packages: str) -> None:
    """Raise an error if packages of an extra are not installed.

    Args:
        what: name of the feature that needs the packages, for the error.
        extra: the extra of onefold-jobs that contains the packages.
        packages: import names of the packages.

    Raises:
        LaunchError: a package is not installed. The message gives the install command.

    >>> require("the report", "report", "json")
    """
    # find_spec instead of import: importing transformers takes seconds, so it is imported on use.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise LaunchError(
            f"{what} requires packages that are not installed ({', '.join(missing)}); "
            f'run: pip install "onefold-jobs[{extra}]"'
        )
