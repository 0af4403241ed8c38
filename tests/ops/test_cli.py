"""``diloco`` without a command: help in groups, without an import of what commands need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

from diloco import __version__
from diloco.settings.presets import run_settings
from diloco_ops import command_list
from diloco_ops.default_text import default_of
from diloco_report.units import count

HEAVY = ("numpy", "jax", "numba", "textual", "uvicorn", "torch", "scipy", "pydantic", "nats", "rich", "typer", "asyncio")
PROGRAM = (
    "import atexit, sys\n"
    "sys.argv = ['diloco', *sys.argv[1:]]\n"
    "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
    "from diloco_ops.cli import main\n"
    "main()\n"
)


def diloco(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """Run the command; all modules that it had imported at its end follow on stderr."""
    environment = os.environ | {"COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.tool
@pytest.mark.parametrize(("arguments", "code"), [(("--help",), 0), ((), 2), (("--version",), 0)])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...], code: int) -> None:
    ended = diloco(*arguments)
    assert ended.returncode == code
    imported = {name.partition(".")[0] for name in ended.stderr.split()}
    assert imported & {"diloco", "diloco_ops"} == {"diloco", "diloco_ops"}
    assert imported & set(HEAVY) == set()
    assert ended.stdout == f"diloco {__version__}\n" if arguments == ("--version",) else "Usage: diloco COMMAND" in ended.stdout


@pytest.mark.tool
def test_a_command_imports_no_other() -> None:
    imported = set(diloco("keys", "--help").stderr.split())
    assert "diloco_ops.keys.keys_command" in imported
    assert (
        imported & {"diloco_ops.up.up", "diloco_ops.audit.verify", "diloco_lab", "numba", "jax", "textual", "uvicorn"} == set()
    )


@pytest.mark.tool
def test_a_misspelt_command_is_answered_with_a_close_one() -> None:
    ended = diloco("statu")
    assert ended.returncode == 2
    assert ended.stderr.startswith("diloco: No such command 'statu'. Did you mean 'status'? (diloco --help)\n")
    assert "diloco_ops.reading.inspect" not in ended.stderr


@pytest.mark.tool
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("up", "--tokns", "3"),
            "diloco: No such option: --tokns (Possible options: --open, --task, --tokens) (diloco up --help)",
        ),
        (("keys", "ini"), "diloco: No such command 'ini'. Did you mean 'init'? (diloco keys --help)"),
        (("keys", "init"), "diloco: Missing option '--run'. (diloco keys init --help)"),
        (
            ("up", "--tokens", "many"),
            "diloco: Invalid value for '--tokens': expected a count, such as 600000, 600k, 7.5M or 1e6 (diloco up --help)",
        ),
        (  # the command is named once
            ("up", "--preset", "publishd"),
            "diloco up: no preset 'publishd' (did you mean 'published'?); the presets are decoupled, published, streaming, "
            "diloco, data-parallel",
        ),
    ],
)
def test_a_wrong_use_is_answered_with_the_help_of_its_command(arguments: tuple[str, ...], says: str) -> None:
    ended = diloco(*arguments)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, says)


@pytest.mark.tool
def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    ended = diloco("keys", "init", "/proc/mine", "--run", "train")
    why = "cannot be made: No such file or directory; look at its permissions, or name another place"
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, f"diloco: /proc/mine: {why}")


def test_every_command_has_its_group() -> None:
    listed = [name for lines in command_list.GROUPS.values() for name in lines]
    assert sorted(listed) == sorted(point.name for point in entry_points(group="diloco.commands"))
    assert list(command_list.GROUPS) == ["Run", "Watch", "Operate", "Weights", "Data", "Study"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_has_groups_in_order_and_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    installed = dict.fromkeys([name for lines in command_list.GROUPS.values() for name in lines], "diloco-ops")
    text = command_list.help_text(installed)
    assert re.findall(r"^(\w+)$", text, re.MULTILINE) == [*command_list.GROUPS, "Options"]
    assert max(map(len, text.splitlines())) <= columns
    assert re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE) == list(installed)


def test_help_shows_commands_of_other_distributions_and_none_that_is_not_installed() -> None:
    text = command_list.help_text({"up": "diloco-ops", "mine": "my-package"})
    assert re.findall(r"^(\w+)$", text, re.MULTILINE) == ["Run", "Other", "Options"]
    assert re.search(r"^  mine +From my-package\.$", text, re.MULTILINE)
    assert "lab" not in text


@pytest.mark.tool
def test_up_prints_a_line_before_its_modules_are_imported(tmp_path: Path) -> None:
    """The line comes while an import of `diloco_ops.up.up` waits for its turn."""
    (tmp_path / "diloco_ops_held.py").write_text(
        "import sys\n"
        "class Held:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'diloco_ops.up.up':\n"
        "            sys.stdin.readline()\n"
        "sys.meta_path.insert(0, Held())\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import diloco_ops_held\n{PROGRAM}"
    up = subprocess.Popen(
        [sys.executable, "-c", program, "up", "--nats", "no address"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert up.stdout is not None
    try:
        assert up.stdout.readline() == "diloco up: starting\n"
        out, err = up.communicate("go on\n", timeout=DEADLINE_S)
    finally:
        up.kill()
        up.wait()
    assert out == ""
    assert err.startswith("diloco: ")
    assert up.returncode == 2


@pytest.mark.tool
def test_up_as_json_prints_no_line() -> None:
    ended = diloco("up", "--json", "--nats", "no address")
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.services
def test_help_has_words_and_no_types_of_python() -> None:
    shown = diloco("up", "--help", columns=160).stdout
    assert re.search(r"--set +TEXT +KEY=VALUE, any setting; repeatable", shown)
    assert re.search(r"--plain +Plain lines", shown)
    assert re.search(r"--standbys +NUMBER \[x>=0\]", shown)
    shown += diloco("set", "--help", columns=160).stdout + diloco("wan", "cut", "--help", columns=160).stdout
    assert not re.findall(r"<[a-z]+(?:\[\w+\]>|>| range>)", shown)


@pytest.mark.services
def test_help_states_the_defaults_of_options_that_stand_for_settings() -> None:
    settings = run_settings()
    up, data = (" ".join(diloco(command, "--help", columns=200).stdout.split()) for command in ("up", "data"))
    assert f"Number of learners (M). Default: {settings.learners}." in up
    assert f"Syncers. Default: {settings.shards}; {run_settings('diloco').shards} with preset diloco." in up
    assert f"the data's order. Default: {settings.seed}." in up
    for shown in (up, data):
        assert f"Default: {count(settings.tokens)}." in shown
    assert f"Shares of a run's data. Default: {settings.learners}." in data


def test_a_default_names_the_presets_that_have_another_one() -> None:
    assert (
        default_of("round.steps")
        == "Default: 24; 100 with preset streaming; 500 with preset diloco; 1 with preset data-parallel."
    )
    assert default_of("merge.method", str.upper) == "Default: RDA; AVERAGE with preset streaming, diloco, data-parallel."
