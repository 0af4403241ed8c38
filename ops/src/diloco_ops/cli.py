"""``diloco``: one command for people. Its subcommands are found by entry points, so that no distribution needs another.

An entry point is a function, or a ``typer.Typer`` of several commands.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from diloco import __version__
from diloco.errors import DilocoError
from diloco.process import kernel_cache, observe
from diloco.settings import folders


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diloco {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Decoupled DiLoCo: train one model over many data centers, on ordinary links."""


def _main() -> int | None:
    kernel_cache.choose(folders.cache_dir())
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    elsewhere = dict.fromkeys(("simulate", "lab"), "diloco-lab")  # commands of other distributions
    points = sorted(entry_points(group="diloco.commands"), key=lambda point: point.name)
    meant = [point for point in points if point.name in sys.argv[1:2]]
    if not meant and sys.argv[1:2] and (missing := elsewhere.get(sys.argv[1])):
        raise DilocoError(f"diloco {sys.argv[1]}: not installed: {missing}; install all of it with: pip install 'diloco[all]'")
    for point in meant or points:  # the others need not be imported, which takes longer than many a command
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    code: int | None = app(standalone_mode=False)
    return code


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_usage_errors_as_text, "diloco"))


def _usage_errors_as_text() -> int | None:
    try:
        return _main()
    except typer.TyperException as error:
        if message := error.format_message():  # without one the help has been shown, in place of a command that was not named
            typer.echo(f"diloco: {message} (diloco --help)", err=True)
        return error.exit_code
    except typer.Abort:
        return observe.EXIT_INTERRUPTED


if __name__ == "__main__":
    main()
