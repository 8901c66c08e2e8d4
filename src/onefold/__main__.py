"""``python -m onefold`` is ``onefold``."""

from onefold.cli.main import main

if __name__ == "__main__":
    main()
