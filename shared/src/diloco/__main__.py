"""``python -m diloco``: the command, which another distribution has (``diloco-ops``)."""

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run the command, or say how to install it."""
    for command in entry_points(group="console_scripts", name="diloco"):
        sys.exit(command.load()())
    sys.exit("diloco: the command is not installed; install all of diloco with: pip install 'diloco[all]'")


if __name__ == "__main__":
    main()
