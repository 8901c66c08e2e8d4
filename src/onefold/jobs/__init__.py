"""Ready-made training jobs, written with nothing but the public interface."""

import importlib.util

from onefold.errors import LaunchError

__all__ = ["require"]


def require(what: str, extra: str, *packages: str) -> None:
    """Refuse to continue without packages of an extra.

    Args:
        what: what needs the packages, for the error.
        extra: name of the extra of onefold that has them.
        packages: their names, as they are imported.

    Raises:
        LaunchError: a package is not installed; the message has the command that installs it.
    """
    # Looked for and not imported: to import transformers takes seconds, and comes where it is used.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise LaunchError(
            f"{what} needs packages that are not installed here ({', '.join(missing)}); "
            f'run: pip install "onefold[{extra}]"'
        )
