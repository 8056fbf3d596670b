"""What every committed notebook must be: one small function a rule, each yielding a message for each breach.

``test_rules.py`` holds, for every rule, a notebook that breaks it; ``test_notebooks.py`` applies all of them to the
course. The rules protect two things: the stored outputs stay comparable (a notebook that was never run, or whose
outputs hold a path or an address, makes the comparison empty or false), and every lesson has the same shape.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from tests.notebook_meta.links import broken_links
from tools.build_notebooks import METADATA, SETUP_CELL
from tools.run_fast import fast_parameters
from tools.write_curriculum import OBJECTIVE, REQUIREMENT

SECTIONS = (
    "the problem",
    "the idea",
    "under the hood",
    "try it",
    "dial it in",
    "where it bites you",
    "in production",
    "check yourself",
    "cheat sheet",
)
TAGS = {
    "setup",
    "parameters",
    "predict",
    "experiment",
    "gpu",
    "timing",
    "exercise",
    "check",
    "solution",
    "wrong",
    "demo-output",
    "nbval-ignore-output",
    "nbval-check-output",
}
CURRICULUM = re.compile(f"{OBJECTIVE.pattern}|{REQUIREMENT.pattern}")  # see tools/write_curriculum.py
IGNORED = "nbval-ignore-output"
MAY_BE_IGNORED = {"timing", "gpu"}
MAX_IGNORED_SHARE = 0.2
MAX_EXPERIMENT_LINES = 15
MAX_OUTPUT_BYTES = 100_000
MAX_NOTEBOOK_BYTES = 300_000


@dataclass(frozen=True)
class Page:
    """A notebook and where it lies; links are relative to ``path``, ``root`` is the project's folder."""

    notebook: NotebookNode
    path: Path
    root: Path

    @property
    def is_lesson(self) -> bool:
        """Lessons have the course's sections; exercises, and the answers to them, have tasks."""
        return self.path.is_relative_to(self.root / "notebooks")

    @property
    def is_exercise(self) -> bool:
        return any(self.path.is_relative_to(self.root / folder) for folder in ("exercises", "solutions"))

    @cached_property
    def code(self) -> list[NotebookNode]:
        return [cell for cell in self.notebook.cells if cell.cell_type == "code"]

    @cached_property
    def markdown(self) -> str:
        return "\n\n".join(cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")

    def tagged(self, tag: str) -> list[NotebookNode]:
        return [cell for cell in self.code if tag in tags(cell)]


Rule = Callable[[Page], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def breaches(page: Page) -> list[str]:
    """Every breach of every rule, as ``rule: message``."""
    return [f"{name}: {message}" for name, check in RULES.items() for message in check(page)]


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def name(cell: NotebookNode) -> str:
    """How a message names a cell: by its first line, which the author can search for."""
    return repr(cell.source.partition("\n")[0][:60])


def texts(cell: NotebookNode) -> Iterator[tuple[str, str]]:
    """(kind, text) of all that is stored under a cell, kind being a MIME type or ``stream``."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield "stream", output.text
        for mime, data in output.get("data", {}).items():
            yield mime, data if isinstance(data, str) else str(data)


# ---------------------------------------------------------------------- the file


@rule
def is_valid(page: Page) -> Iterator[str]:
    ids = [cell.get("id") for cell in page.notebook.cells]
    if len(set(ids)) < len(ids):
        yield "two cells have the same id"
        return
    try:
        nbformat.validate(nbformat.from_dict(page.notebook))  # a copy: validation mends what it can
    except nbformat.ValidationError as error:
        yield str(error).partition("\n")[0]


@rule
def metadata_is_bare(page: Page) -> Iterator[str]:
    """GitHub does not show a notebook with a ``widgets`` entry; nobody else can run one that names a private kernel."""
    if page.notebook.metadata != METADATA:
        yield f"the notebook's metadata must be exactly {METADATA}"
    for cell in page.notebook.cells:
        if extra := set(cell.metadata) - {"tags"}:
            yield f"cell {name(cell)} has metadata {sorted(extra)}; only tags belong there"


@rule
def is_small(page: Page) -> Iterator[str]:
    size = len(nbformat.writes(page.notebook).encode())
    if size > MAX_NOTEBOOK_BYTES:
        yield f"{size:,} bytes; at most {MAX_NOTEBOOK_BYTES:,}"
    for cell in page.code:
        for kind, text in texts(cell):
            if len(text.encode()) > MAX_OUTPUT_BYTES:
                yield f"cell {name(cell)} stores {len(text.encode()):,} bytes of {kind}; at most {MAX_OUTPUT_BYTES:,}"


# ---------------------------------------------------------------------- stored outputs


@rule
def was_run_top_to_bottom(page: Page) -> Iterator[str]:
    counts = [cell.execution_count for cell in page.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}: build the notebook, do not save it from an editor"


@rule
def something_is_compared(page: Page) -> Iterator[str]:
    """Without stored outputs, strict nbval passes whatever the code does."""
    if not any(cell.outputs for cell in page.code if not {"setup", IGNORED} & set(tags(cell))):
        yield "no cell but the set-up has a stored output that is compared"


@rule
def few_outputs_are_ignored(page: Page) -> Iterator[str]:
    ignored = page.tagged(IGNORED)
    for cell in ignored:
        if not MAY_BE_IGNORED & set(tags(cell)):
            yield f"cell {name(cell)} is tagged {IGNORED} and neither of {sorted(MAY_BE_IGNORED)}"
    if len(ignored) > MAX_IGNORED_SHARE * len(page.code):
        yield f"{len(ignored)} of {len(page.code)} cells are ignored; at most {MAX_IGNORED_SHARE:.0%}"


@rule
def no_error_is_stored(page: Page) -> Iterator[str]:
    for cell in page.code:
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"cell {name(cell)} ends in an error; show an expected one with expect_error(...)"


@rule
def outputs_are_portable(page: Page) -> Iterator[str]:
    for cell in page.code:
        for kind, text in texts(cell):
            if kind == "image/svg+xml" and "matplotlib" in text.lower():
                yield f"cell {name(cell)} stores matplotlib's SVG, which differs between its versions: use PNG"
            if "widget-view" in kind:
                yield f"cell {name(cell)} stores a widget's handle, which means nothing in another session"


_DISK_PATH = re.compile(
    r"(?<![\w.~/-])/(?:home|root|Users|tmp|usr|opt|mnt|srv|var|private|content|kaggle|workspaces?|work)(?=/)"
    r"|\b[A-Z]:\\\w|\bfile://"
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_EMBEDDED = re.compile(r"base64,[A-Za-z0-9+/=]+")


@rule
def no_trace_of_a_machine(page: Page) -> Iterator[str]:
    for cell in page.notebook.cells:
        stored = texts(cell) if cell.cell_type == "code" else ()
        for kind, text in [("source", cell.source), *stored]:
            if kind in {"image/png", "image/jpeg"}:
                continue
            text = _EMBEDDED.sub("", text)
            if found := _DISK_PATH.search(text):
                yield f"cell {name(cell)} holds a path of one machine near {text[found.start() : found.end() + 20]!r}"
            if found := _ADDRESS.search(text):
                yield f"cell {name(cell)} holds a memory address: {found[0]}"


# ---------------------------------------------------------------------- code


@rule
def tags_are_known(page: Page) -> Iterator[str]:
    for cell in page.notebook.cells:
        if unknown := {tag for tag in tags(cell) if tag not in TAGS and not CURRICULUM.fullmatch(tag)}:
            yield f"cell {name(cell)} has unknown tags {sorted(unknown)}; known are {sorted(TAGS)}"
        if cell.cell_type == "code" and "NBVAL_" in cell.source:
            yield f"cell {name(cell)} steers nbval by a comment; use the tag {IGNORED}, which is counted"


@rule
def setup_cell_is_first(page: Page) -> Iterator[str]:
    if not page.code or page.code[0].source != SETUP_CELL or tags(page.code[0]) != ["setup"]:
        yield "the first code cell is not the set-up cell that the build puts there"


@rule
def no_cell_is_empty(page: Page) -> Iterator[str]:
    for position, cell in enumerate(page.notebook.cells):
        if not cell.source.strip():
            yield f"cell {position} is empty"
        elif cell.cell_type == "code" and all(re.match(r"\s*(#|$)", line) for line in cell.source.splitlines()):
            yield f"cell {name(cell)} holds only comments; words go into a cell that begins with '# %% [markdown]'"


@rule
def no_trailing_semicolon(page: Page) -> Iterator[str]:
    for cell in page.code:
        if cell.source.rstrip().endswith(";"):
            yield f"cell {name(cell)} ends in ';', which hides nothing when the cell is tested: assign to _ instead"


_BANNED_CALLS = {
    "clear_output": "the comparison sees what it clears: publish once, at the end",
    "interact": "it prints into an Output widget, whose text is compared all the same: use widget.observe",
    "interactive": "it prints into an Output widget, whose text is compared all the same: use widget.observe",
    "Output": "what it swallows is still compared: set an HTML widget's value",
    "getpid": "every run has another number",
    "system": "a shell's output differs between machines; run Python",
    "getoutput": "a shell's output differs between machines; run Python",
}
_BANNED_IMPORTS = {
    "subprocess": "what a child prints is lost when the cell is tested",
    "tqdm": "plain bars print rates: use tqdm.auto",
}
_BANNED_MAGICS = {"time", "timeit", "capture", "bash", "sh"}


@rule
def code_is_comparable(page: Page) -> Iterator[str]:
    """Reject what cannot give the same output twice, or gives none when tested."""
    for cell in page.code:
        if cell.source == SETUP_CELL:
            continue
        try:
            tree = ast.parse(TransformerManager().transform_cell(cell.source))
        except SyntaxError as error:
            yield f"cell {name(cell)} is not Python: {error}"
            continue
        for node in ast.walk(tree):
            if problem := _problem(node):
                yield f"cell {name(cell)}: {problem}"


def _problem(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _BANNED_CALLS:
            return f"{called}(): {_BANNED_CALLS[called]}"
        case ast.Call(
            func=ast.Attribute(attr="run_line_magic" | "run_cell_magic"), args=[ast.Constant(value=magic), *_]
        ) if magic in _BANNED_MAGICS:
            return f"%{magic}: its output differs from run to run; measure with the package's helpers"
        case ast.Import(names=names):
            banned = [alias.name for alias in names if alias.name in _BANNED_IMPORTS]
            return f"import {banned[0]}: {_BANNED_IMPORTS[banned[0]]}" if banned else None
        case ast.ImportFrom(module=module) if module in _BANNED_IMPORTS:
            return f"from {module} import: {_BANNED_IMPORTS[module]}"
        case ast.Attribute(attr="__version__"):
            return "__version__: a version belongs in constraints.txt, not in an output"
    return None


# ---------------------------------------------------------------------- the shape of a lesson


@rule
def links_resolve(page: Page) -> Iterator[str]:
    yield from broken_links(page.markdown, page.path, page.root)


@rule
def introduction_is_complete(page: Page) -> Iterator[str]:
    first = page.notebook.cells[0]
    if first.cell_type != "markdown" or not re.match(r"# \S", first.source):
        yield "the first cell must be markdown and begin with '# ' and the title"
    if len(re.findall(r"^# ", page.markdown, re.MULTILINE)) != 1:
        yield "there must be one title, a single heading with one '#'"
    if "colab-badge.svg" not in first.source:
        yield "the Colab badge is missing under the title"
    goals = re.search(r"you will be able to\b.*\n+((?:[-*] .*(?:\n  .*)*\n*)+)", first.source, re.IGNORECASE)
    bullets = re.findall(r"^[-*] ", goals[1], re.MULTILINE) if goals else []
    if not 1 <= len(bullets) <= 4:
        yield f"after 'You will be able to' come one to four bullets; found {len(bullets)}"
    if not re.search(r"\bminutes?\b", first.source):
        yield "the introduction must say how many minutes the notebook takes, and on what hardware"
    if page.is_exercise and not re.search(r"^\d+ minutes · difficulty (?:●○○|●●○|●●●) · ", first.source, re.MULTILINE):
        yield "the introduction to an exercise has a line like '15 minutes · difficulty ●○○ · after [the lesson](...)'"


@rule
def sections_are_there(page: Page) -> Iterator[str]:
    if not page.is_lesson:
        return
    headings = [heading.lower() for heading in re.findall(r"^## +(.+)$", page.markdown, re.MULTILINE)]
    found = []
    for section in SECTIONS:
        places = [i for i, heading in enumerate(headings) if re.match(rf"{section}\b", heading)]
        if len(places) != 1:
            yield f"one heading must begin with '## {section.capitalize()}'; found {len(places)}"
        found += places[:1]
    if found != sorted(found):
        yield f"the sections are out of order; the order is {', '.join(SECTIONS)}"


@rule
def parameters_follow_setup(page: Page) -> Iterator[str]:
    if page.is_lesson and [cell is page.code[1] for cell in page.tagged("parameters")] != [True]:
        yield "the second code cell, and no other, must be tagged 'parameters': it holds what a sweep may change"


@rule
def a_fast_run_is_possible(page: Page) -> Iterator[str]:
    for cell in page.tagged("parameters") if page.is_lesson else ():
        try:
            if not fast_parameters(cell.source):
                yield "no parameter has a value for fast runs: NUM_PROMPTS = 32  # prompts; fast: 4"
        except ValueError as error:
            yield str(error)


@rule
def predictions_are_open(page: Page) -> Iterator[str]:
    """The learner guesses, so the stored guesses are empty; every lesson asks for at least one."""
    if page.is_lesson and not page.tagged("predict"):
        yield "no cell is tagged 'predict'"
    for cell in page.tagged("predict"):
        calls = [
            node
            for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "predict"
        ]
        if not calls:
            yield f"cell {name(cell)} is tagged 'predict' and does not call predict()"
        for keyword in (keyword for call in calls for keyword in call.keywords):
            if not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None):
                yield f"cell {name(cell)} gives {keyword.arg} away: a stored prediction must be None"


@rule
def experiments_are_short(page: Page) -> Iterator[str]:
    for cell in page.tagged("experiment"):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if len(lines) > MAX_EXPERIMENT_LINES:
            yield f"cell {name(cell)} has {len(lines)} lines; an experiment has at most {MAX_EXPERIMENT_LINES}"


@rule
def answers_are_hidden(page: Page) -> Iterator[str]:
    if not page.is_lesson:
        return
    section = re.search(r"^## +check yourself\b.*?(?=^## |\Z)", page.markdown, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    if section and "<details>" not in section[0]:
        yield "the answers under 'Check yourself' must be inside <details>, so that nobody reads them by accident"


# ---------------------------------------------------------------------- the shape of an exercise


@rule
def tasks_are_complete(page: Page) -> Iterator[str]:
    """A task is a cell to write in, a check of it, and hints in stages that nobody reads by accident."""
    if not page.is_exercise:
        return
    if not page.tagged("exercise"):
        yield "no cell is tagged 'exercise'"
    cells = page.notebook.cells
    for i, cell in enumerate(cells):
        if cell.cell_type == "code" and "exercise" in tags(cell):
            check, hints = [*cells[i + 1:i + 3], NotebookNode(), NotebookNode()][:2]
            if check.get("cell_type") != "code" or "check" not in tags(check):
                yield f"after cell {name(cell)} comes a cell tagged 'check'"
            found = re.findall(r"^<details><summary>Hint (\d):", hints.get("source", ""), re.MULTILINE)
            if len(found) < 2 or found != [str(n + 1) for n in range(len(found))]:
                yield (f"after the check of cell {name(cell)} come hints: at least two times "
                       "'<details><summary>Hint 1: ...</summary>', numbered from 1")


@rule
def answers_are_checked_before_use(page: Page) -> Iterator[str]:
    """What a learner defines goes to its check only; other cells get `use()`'s result, so that they always work."""
    if not page.is_exercise:
        return
    own: set[str] = set()
    for cell in page.code:
        if "exercise" in tags(cell):
            own |= {node.name for node in ast.parse(cell.source).body
                    if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        elif cell.source != SETUP_CELL and not {"check", "wrong"} & set(tags(cell)):
            try:
                used = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
            except SyntaxError:
                continue  # another rule says so
            for found in sorted(own & used):
                yield f"cell {name(cell)} uses {found}, which may be unwritten: give the check's use() another name"
