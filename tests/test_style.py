"""The style that a linter has no rule for: sizes, words, docstrings of arrays. Nothing of the project is imported.

``TOLERATED`` names what does not follow a rule yet, by the beginning of its path. Entries go, none is added.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.tool

ROOT = Path(__file__).parents[1]
PRODUCTION = ("shared/", "services/", "report/", "ops/", "lab/")
MAX_FILE_LINES = 500
MAX_CLASS_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_MODULES = 20  # of one folder
MAX_POSITIONAL = 7  # a reader of a call with more has to count them
MAX_FIELDS = 5  # of an object that is made: they are looked up in another file

# words of our own, where the field or plain English has one; a name in quotes may be a key of a report or a tape
WORDS = re.compile(
    r"(?<![a-z`'\"-])(anew|spoilt|barred|undecided|rota|steward|leaseholder|mend(s|ed|ing)?|deeds|patiently|whoever|put_all_right)(?![a-z])",
    re.I,
)
# a process, a learner or a user is meant, so name it
PERSONS = re.compile(r"\b(nobody|somebody|whoever|anew)\b", re.I)
MAX_PERSONS = 40
NAMES = {"told"}
OPENINGS = re.compile(r"(What|Who|Whoever|Whatever|Those of)\b")
# a function's docstring begins with a verb; ruff's D401 sees other forms of a verb, but no noun
NO_VERBS = re.compile(
    r"(The|A|An|All|As|By|Each|Every|For|From|How|In|It|Its|Of|One|That|Their|Those|What|When|Where|Which|Who|Why)\b"
)
SHAPE = re.compile(r"\b(bool|u?int(8|16|32|64)?|float(16|32|64)?|bytes|number|any dtype)`* ?\[")

# places that do not follow a rule yet, by the beginning of their path
TOLERATED: dict[str, tuple[str, ...]] = {
    "sizes": (),
    "words": ("tests/",),
    "persons": (),
    "verbs": (),
    "times": (),
    "arrays": (),
}  # fmt: skip


def files(*suffixes: str, within: tuple[str, ...] = ("",), rule: str = "") -> list[str]:
    """Return the paths of all tracked and new files with one of the suffixes, without this one and what ``rule`` tolerates."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    left_out = ("tests/test_style.py", *TOLERATED.get(rule, ()))
    return [
        path
        for path in listed
        if path.endswith(suffixes) and path.startswith(within) and not path.startswith(left_out) and (ROOT / path).exists()
    ]


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def nodes(path: str) -> list[ast.AST]:
    """Return the definitions, calls and names of a module."""
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    kinds = (*definitions, ast.Assign, ast.Call, ast.Name, ast.Attribute, ast.arg)
    return [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, kinds)]


def demand(rule: str, found: Iterator[str]) -> None:
    wrong = [place for place in found if not place.startswith(TOLERATED[rule])]
    assert not wrong, "\n" + "\n".join(wrong)


def functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public_functions(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
                    yield child


def test_sizes() -> None:
    def found() -> Iterator[str]:
        for path in files(".py", within=PRODUCTION):
            text = read(path)
            if text.count("\n") > MAX_FILE_LINES:
                yield f"{path}: {text.count(chr(10))} lines, at most {MAX_FILE_LINES}"
            for node in nodes(path):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
                    if lines > limit:
                        yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {limit}"

    demand("sizes", found())


def test_a_call_with_many_arguments_names_them() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node.func)} is called with {len(node.args)} positional arguments: name them"
        for path in files(".py", within=PRODUCTION)
        for node in nodes(path)
        if isinstance(node, ast.Call) and len(node.args) > (MAX_FIELDS if _makes_object(node) else MAX_POSITIONAL)
    ]
    assert not found, "\n" + "\n".join(found)


def _makes_object(call: ast.Call) -> bool:
    """Whether a call is that of a class, by its name. A table's columns are no fields."""
    name = ast.unparse(call.func).rpartition(".")[2].lstrip("_")
    return name[:1].isupper() and not name.isupper() and name != "Table"


def test_a_class_has_a_name_of_its_own() -> None:
    """A name that is looked for leads to one class. Templates are files of users."""
    places: dict[str, list[str]] = {}
    for path in files(".py", within=PRODUCTION):
        for node in ast.parse(read(path)).body if "/templates/" not in path else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_a_folder_shows_its_plan_at_a_glance() -> None:
    modules = Counter(str(Path(path).parent) for path in files(".py", within=PRODUCTION) if not path.endswith("/__init__.py"))
    assert not {folder: count for folder, count in modules.items() if count > MAX_MODULES and "/templates/" not in folder}


def test_a_modules_name_leads_to_it() -> None:
    """Few files have the same name, but for those that Python and every service have."""
    paths = [Path(path) for path in files(".py", within=PRODUCTION) if "/templates/" not in path]
    names = Counter(path.stem for path in paths if path.stem not in ("__init__", "__main__", "service"))
    assert not {name: count for name, count in names.items() if count > 2}


def test_words() -> None:
    def found() -> Iterator[str]:
        for path in files(".py", ".md", ".toml", ".yml", ".yaml", ".conf", rule="words"):
            text = read(path)
            for word in WORDS.finditer(text):
                yield f"{path}:{text.count(chr(10), 0, word.start()) + 1}: {word[0]!r}"
        for path in files(".py", rule="words"):
            for node in nodes(path):
                name = next((value for field in ("id", "name", "attr", "arg") if (value := getattr(node, field, None))), None)
                if name in NAMES:
                    yield f"{path}:{getattr(node, 'lineno', 0)}: {name!r} is no name"
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if OPENINGS.match(text):
                        yield f"{path}:{getattr(node, 'lineno', 1)}: begins with {text.splitlines()[0][:40]!r}"

    demand("words", found())


def test_sentences_name_what_acts() -> None:
    """A few sentences about people may remain; elsewhere it is a learner, a process or a message that acts."""
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path in files(".py", ".md", ".toml", rule="persons")
        for number, line in enumerate(read(path).splitlines(), 1)
        for _ in PERSONS.finditer(line)
    ]
    assert len(found) <= MAX_PERSONS, "\n" + "\n".join(found)


def test_a_function_is_described_by_a_verb() -> None:
    def found() -> Iterator[str]:
        for path in files(".py", within=PRODUCTION):
            for node in functions(path):
                decorators = {ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in node.decorator_list}
                text = ast.get_docstring(node) or ""
                if not decorators & {"property", "cached_property"} and NO_VERBS.match(text):
                    yield f"{path}:{node.lineno}: {node.name}: {text.splitlines()[0][:60]!r}"

    demand("verbs", found())


def test_times_are_explained() -> None:
    """A time in seconds that is no setting says why it is what it is, on its line or the one before."""

    def found() -> Iterator[str]:
        for path in files(".py", within=PRODUCTION):
            lines = ["", *read(path).splitlines()]
            for number, line in enumerate(lines):
                explained = "#" in line or lines[number - 1].lstrip().startswith("#")
                if (time := re.match(r"_?[A-Z][A-Z_]*_S = ", line)) and not explained:
                    yield f"{path}:{number}: {time[0][:-3]}: why so long?"

    demand("times", found())


def array_names() -> set[str]:
    """Return the names that stand for arrays in annotations: NDArray and its aliases."""
    names = {"NDArray"}
    for path in files(".py", within=PRODUCTION):
        for node in nodes(path):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("NDArray", "np.ndarray")):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_arrays_are_described() -> None:
    """A public function states the type and shape of its arrays, as in ``float32 [rows, columns]``."""
    names = array_names()

    def takes_arrays(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        annotations = [argument.annotation for argument in arguments] + [node.returns]
        used = {
            part.id for annotation in annotations if annotation for part in ast.walk(annotation) if isinstance(part, ast.Name)
        }
        return bool(used & names)

    def found() -> Iterator[str]:
        for path in files(".py", within=PRODUCTION):
            for node in public_functions(path):
                if takes_arrays(node) and not SHAPE.search(ast.get_docstring(node) or ""):
                    yield f"{path}:{node.lineno}: {node.name} takes or returns arrays: state dtype and shape"

    demand("arrays", found())


@pytest.mark.parametrize("rule", TOLERATED)
def test_nothing_is_tolerated_twice(rule: str) -> None:
    assert list(TOLERATED[rule]) == sorted(set(TOLERATED[rule]))
