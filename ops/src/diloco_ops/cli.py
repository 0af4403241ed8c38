"""``diloco``: one command for people. Its subcommands are found by entry points, so that no distribution needs another.

An entry point is a function, or a ``typer.Typer`` of several commands. Only the module of the named command is imported, and
``diloco --help`` imports none.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import entry_points

from diloco import __version__
from diloco_ops import command_list

EXIT_USAGE = 2
# errors of a path that a user named, or of its disk: no defect of the command
FILE_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT,
    errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
ELSEWHERE = dict.fromkeys(("simulate", "lab"), "diloco-lab")  # commands of other distributions


def main() -> None:
    """Console script."""
    words = sys.argv[1:]
    if not words or words[0] == "--help":
        points = entry_points(group="diloco.commands")
        _print(command_list.help_text({point.name: point.dist.name if point.dist else "" for point in points}))
        sys.exit(0 if words else EXIT_USAGE)
    if words[0] == "--version":
        _print(f"diloco {__version__}\n")
        sys.exit(0)
    named = next((word for word in words if not word.startswith("-")), "")
    if (line := command_list.FIRST_LINES.get(named)) and not {"--json", "--help"} & {*words}:
        _print(line + "\n")

    from diloco.process import observe  # imports more than help needs

    sys.exit(observe.run_main(lambda: _usage_errors_as_text(named), "diloco"))


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader is gone; stdout is flushed once more at exit, which must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_errors_as_text(named: str) -> int | None:
    import typer

    from diloco.errors import DilocoError
    from diloco.process import observe

    try:
        return _run(named)
    except typer.TyperException as error:
        if message := error.format_message():  # without one the help has been shown, in place of a command that was not named
            context = getattr(error, "ctx", None)
            typer.echo(f"diloco: {message} ({context.command_path if context else 'diloco'} --help)", err=True)
        return error.exit_code
    except typer.Abort:
        return observe.EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in FILE_ERRORS or not isinstance(error.filename, str | bytes):
            raise
        why = f"{error.strerror}; look at its permissions, or name another place"
        raise DilocoError(f"{os.fsdecode(error.filename)}: cannot be used: {why}") from None


def _run(named: str) -> int | None:
    import typer

    from diloco.core.tensors.compiled import kernels
    from diloco.errors import DilocoError
    from diloco.process import kernel_cache
    from diloco.settings import folders
    from diloco_ops.help_words import put_words
    from diloco_ops.up.progress_lines import progress_line

    kernel_cache.choose(folders.cache_dir())
    kernels.announce = _announce_compilation
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    points = list(entry_points(group="diloco.commands"))
    meant = [point for point in points if point.name == named]
    if not meant and (missing := ELSEWHERE.get(named)):
        raise DilocoError(f"diloco {named}: not installed: {missing}; install all of it with: pip install 'diloco[all]'")
    for point in meant:
        with progress_line(f"diloco {named}: loading", quiet=not sys.stderr.isatty(), file=sys.stderr):
            command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(point.name)(command)
    if not meant:
        for point in points:  # so that a misspelt name is answered with those that are close to it
            app.command(point.name)(_root)
    command = typer.main.get_command(app)
    if "--help" in sys.argv:
        put_words(command)
    code: int | None = command(standalone_mode=False, prog_name="diloco")
    return code


def _root() -> None:
    pass


def _announce_compilation() -> None:
    print("diloco: compiling the kernels, once for this installation", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
