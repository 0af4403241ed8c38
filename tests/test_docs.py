"""The docs say what the code does: settings, their defaults, and names of commands."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from tests.made.message_bounds import bound_rows

import diloco_coordinator.run_metrics
import diloco_learner.run.learner_metrics
import diloco_syncer.syncer_metrics
from diloco.core.run.changes import SETTABLE
from diloco.nats.identity import ROLES
from diloco.service import metrics
from diloco.service.metrics import Metric
from diloco.settings.presets import PRESETS, run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import ServiceSettings, TorchLearnerSettings
from diloco.settings.validation import all_names
from diloco_coordinator.server_watch import server_metrics as server_watch
from diloco_ops.keys.permissions import CONTROL, Who, is_known, permissions

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
METRICS = ROOT / "docs" / "metrics.md"
SECURITY = ROOT / "docs" / "security.md"
MAINTAINERS = ROOT / "docs" / "maintainers.md"
QUALITY = ROOT / "docs" / "quality.md"
SERVICES_TESTS = ROOT / "tests" / "services"
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
TABLE_BEGINS, TABLE_ENDS = "<!-- made from the code -->\n", "\n<!-- end -->"
BOUNDS_BEGIN = "<!-- made from tests/made/message_bounds.py -->\n"
HEAD = """# Settings of a run

`python -m tests.test_docs` makes this page from the code. Set a setting with `--set NAME=VALUE`. All members of a run have the
same settings, which are stored with the run. `diloco set` changes those with a ↻ during the run
([operations.md](operations.md#changing-a-run-that-goes-on)). "Unpublished" marks values that the paper (arXiv 2604.21428)
does not state. It also does not state `outer.learning_rate`, `outer.momentum`, `inner.*` and `codec.record_bits`.
[user-guide.md](user-guide.md#presets-and-settings) lists the values of the preset `published` that are not from the paper.

"""


LEARNERS = """
# Settings of a learner

Only learners have these settings. Set them in the learner's TOML file, or by variables `DILOCO_*` in its environment.
`mesh.data` is `data` below `[mesh]` in the file, and `DILOCO_MESH='{"data": 2}'` in the environment. Learners of one run may
have different values. `diloco up` passes `DILOCO_CACHE_DIR`, `DILOCO_CHECKPOINT_S`, `DILOCO_LEAVE_S` and `DILOCO_MESH` to all
its learners, and `DILOCO_SAMPLE_EVERY_S` to the evaluator.

"""


def learner_rows() -> list[str]:
    """A line for every setting that only learners have."""
    rows = ["| setting | default | allowed | meaning |", "|---" * 4 + "|"]
    for name in all_names(TorchLearnerSettings):
        if name.partition(".")[0] in ServiceSettings.model_fields:
            continue
        field = _field(name, TorchLearnerSettings)
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{name}` | {default} | {_allowed(field)} | {field.description or ''} |")
    return rows


def settings_page() -> str:
    """The tables of all settings."""
    presets = [run_settings(name) for name in PRESETS]
    rows = [f"| setting | {' | '.join(PRESETS)} | allowed | meaning |", "|---" * (len(PRESETS) + 3) + "|"]
    for name in all_names():
        field = _field(name)
        values = [_value(preset, name) for preset in presets]
        shown = [f"`{values[0]}`"] + [f"**`{value}`**" if value != values[0] else "" for value in values[1:]]
        mark = " ↻" if name in ("tokens", *SETTABLE) else ""
        rows.append(f"| `{name}`{mark} | {' | '.join(shown)} | {_allowed(field)} | {field.description or ''} |")
    run_table = HEAD + "\n".join(rows) + "\n\nAn empty cell means the value of `decoupled`.\n"
    return run_table + LEARNERS + "\n".join(learner_rows()) + "\n"


def _field(name: str, model: type[BaseModel] = RunSettings) -> Any:
    *sections, last = name.split(".")
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        model = annotation
    return model.model_fields[last]


def _value(settings: RunSettings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _allowed(field: Any) -> str:
    arguments = () if get_origin(field.annotation) is list else get_args(field.annotation)
    choices = [choice for choice in arguments if choice is not None and not isinstance(choice, type)]
    choices = [get_args(choice)[0] if get_args(choice) else choice for choice in choices]
    bounds = []
    for item in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            limit = getattr(item, attribute, PydanticUndefined)
            if limit is not PydanticUndefined:
                bounds.append(f"{sign} {limit}")
    return ", ".join([*(f"`{choice}`" for choice in choices), *bounds])


def test_the_settings_page_is_made_from_the_code() -> None:
    assert SETTINGS.read_text() == settings_page(), "run: python -m tests.test_docs"


def metrics_rows() -> list[str]:
    """A line for every metric of every service, in the order of the page."""
    tables: list[tuple[Metric[Any], ...]] = [
        metrics.COMMON,
        metrics.CONNECTED,
        diloco_learner.run.learner_metrics.METRICS,
        diloco_learner.run.learner_metrics.OF_PROCESSES,
        diloco_syncer.syncer_metrics.METRICS,
        diloco_coordinator.run_metrics.METRICS,
        server_watch.METRICS,
    ]
    return [
        f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.meaning} |"
        for table in tables
        for metric in table
    ]


def test_the_metrics_page_lists_what_services_tell() -> None:
    rows = metrics_rows()
    assert [line for line in METRICS.read_text().splitlines() if line.startswith("| `diloco_")] == rows
    names = [row.split("`")[1] for row in rows]
    assert len(set(names)) == len(names) > 40
    for row, name in zip(rows, names, strict=True):
        assert re.fullmatch(r"diloco_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == ("| counter |" in row), name


def permission_rows() -> list[str]:
    """A line for every subject that anybody may publish to or hear, and where each role may."""
    alike: dict[str, Who] = {
        role: Who("NAME", role, None if role in ("operator", "observer") else "us", public_key="UKEY") for role in ROLES
    }
    whose = {"learner": alike["learner"], "founder": replace(alike["learner"], founder=True)} | alike
    whose["creator"] = replace(alike["coordinator"], founder=True)
    places = {"c": [CONTROL], "h": ["us"], "o": ["eu"]}
    rows = [f"| | {' | '.join(whose)} |", "|---" * (len(whose) + 1) + "|"]
    for what in ("publish", "subscribe"):
        may = {
            (role, place): [
                re.sub(r"NAME-KEY-\d\b", "NAME-KEY-n", subject)
                for subject in getattr(permissions(who, "R", ["us", "eu"], serves), what)
            ]
            for role, who in whose.items()
            for place, serves in places.items()
            if is_known(who, ["us", "eu"], serves)
        }
        subjects = dict.fromkeys(subject for allowed in may.values() for subject in allowed)
        rows.append(f"| **{what}** |{' |' * len(whose)}")
        for subject in subjects:
            cells = ["".join(place for place in places if subject in may.get((role, place), ())) for role in whose]
            rows.append(f"| `{subject}` | {' | '.join(cells)} |")
    return rows


def promise_rows() -> list[str]:
    """A line for every promise that a test is marked with, and the tests that keep it."""
    kept: dict[str, list[str]] = {}
    for path in sorted(SERVICES_TESTS.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        shared = {
            target.id: text
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
            for text in _promises(node.value, {})
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    for text in _promises(decorator, shared):
                        kept.setdefault(text, []).append(f"`{path.stem}::{node.name}`")
    return ["| promise | test |", "|---|---|", *(f"| {text} | {', '.join(tests)} |" for text, tests in kept.items())]


def _promises(node: ast.expr, shared: Mapping[str, str]) -> list[str]:
    """Texts of the marks ``promise`` within an expression; ``shared``: those of a module's own names."""
    texts = []
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in shared:
            texts.append(shared[part.id])
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "promise":
            [argument] = part.args
            assert isinstance(argument, ast.Constant)
            texts.append(str(argument.value))
    return texts


def with_table(page: Path, rows: list[str], begins: str = TABLE_BEGINS) -> str:
    """A page with its table as the code has it."""
    before, _, rest = page.read_text().partition(begins)
    return before + begins + "\n".join(rows) + rest[rest.index(TABLE_ENDS) :]


def test_the_table_of_permissions_is_made_from_the_code() -> None:
    assert SECURITY.read_text() == with_table(SECURITY, permission_rows()), "run: python -m tests.test_docs"


def test_the_table_of_bounds_is_that_of_the_tests() -> None:
    assert SECURITY.read_text() == with_table(SECURITY, bound_rows(), BOUNDS_BEGIN), "run: python -m tests.test_docs"


def test_every_promise_is_kept_by_one_test_that_is_listed() -> None:
    rows = promise_rows()
    assert MAINTAINERS.read_text() == with_table(MAINTAINERS, rows), "run: python -m tests.test_docs"
    assert len(rows) > 30
    assert [row for row in rows[2:] if row.count("::") != 1] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_settings_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = {point.name for point in entry_points(group="diloco.commands")}
    for command in re.findall(r"^(?:\$ |\./)?diloco ([a-z]+)", text, re.MULTILINE):
        assert command in commands, f"{page} names `diloco {command}`"
    for setting in re.findall(r"--set ([a-z_.]+)=", text):
        assert setting in all_names(), f"{page} names the setting {setting}"
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/glossary.md", "docs/maintainers.md"])
def test_modules_that_the_docs_name_exist(page: str) -> None:
    """With folders, from a distribution's name (``ops/`` for ``diloco_ops/``) or from anywhere below."""
    places = {
        "/" + str(path.relative_to(ROOT)).replace("/diloco_", "/")
        for path in ROOT.glob("*/**/*.py")
        if not any(part.startswith(".venv") for part in path.parts)
    }
    text = re.sub(r"`[^`]*` at commit [0-9a-f]{8}", "", (ROOT / page).read_text())
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert any(place.endswith("/" + name.removeprefix("diloco_")) for place in places), f"{page} names {name}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them; a repeated heading has a number behind it."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_to_a_heading_find_it(page: str) -> None:
    path = ROOT / page
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*\.md|)#([^)\s]+)\)", path.read_text()):
        assert anchor in headings(path.parent / target if target else path), f"{page} links to {target}#{anchor}"


def test_tests_that_the_page_on_security_names_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", SECURITY.read_text())
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_numbers_of_the_page_on_quality_are_those_of_the_trials() -> None:
    number = r"[+-]\d+\.\d"
    quoted = re.findall(rf"{number} ± \d+\.\d %(?: \(\d+ pairs\), at most {number} % with 95 %)?", QUALITY.read_text())
    trials = "".join(page.read_text() for page in sorted(QUALITY.with_suffix("").glob("*.md")))
    assert len(quoted) > 10
    assert [text for text in quoted if text not in trials] == []


def test_every_picture_is_made_by_a_command_that_is_named() -> None:
    docs = ROOT / "docs"
    section = (docs / "maintainers.md").read_text().split("## Pictures in docs\n")[1].split("\n## ")[0]
    made = [name for row in re.findall(r"^\| (`.*?) \| `", section, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    files = {str(path.relative_to(docs)) for path in docs.rglob("*") if path.suffix in (".svg", ".png")}
    found = {pattern: {str(path.relative_to(docs)) for path in docs.glob(pattern)} for pattern in made}
    assert all(found.values()), found
    assert set.union(*found.values()) == files


if __name__ == "__main__":
    SETTINGS.write_text(settings_page())
    SECURITY.write_text(with_table(SECURITY, permission_rows()))
    SECURITY.write_text(with_table(SECURITY, bound_rows(), BOUNDS_BEGIN))
    MAINTAINERS.write_text(with_table(MAINTAINERS, promise_rows()))
