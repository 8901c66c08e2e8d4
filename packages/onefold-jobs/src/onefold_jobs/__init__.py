"""Ready-made training jobs, written with nothing but the public interface.

The jobs themselves load PyTorch, and are loaded when they are first asked for.
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
    """Refuse to continue without packages of an extra.

    Args:
        what: what needs the packages, for the error.
        extra: name of the extra of onefold that has them.
        packages: their names, as they are imported.

    Raises:
        LaunchError: a package is not installed; the message has the command that installs it.

    >>> require("the report", "report", "json")
    """
    # Looked for and not imported: to import transformers takes seconds, and comes where it is used.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise LaunchError(
            f"{what} needs packages that are not installed here ({', '.join(missing)}); "
            f'run: pip install "onefold-jobs[{extra}]"'
        )
