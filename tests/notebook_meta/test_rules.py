"""Each rule rejects a notebook that breaks it, and all of them accept a good one."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebook_meta.links import broken_links
from tests.notebook_meta.rules import RULES, SECTIONS, Page, breaches
from tools.build_notebooks import METADATA, REPOSITORY, SETUP_CELL

INTRODUCTION = """\
# Blocks

[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com)

You will be able to

- count blocks
- free them

Needs a CPU and five minutes.
"""


def code(source: str, *tags: str, prints: str = "") -> NotebookNode:
    outputs = [new_output("stream", name="stdout", text=prints)] if prints else []
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {}, outputs=outputs)


def good_notebook() -> NotebookNode:
    cells = [
        new_markdown_cell(INTRODUCTION),
        code(SETUP_CELL, "setup", prints="device: cpu\n"),
        code("BLOCK_SIZE = 16  # tokens; fast: 4", "parameters"),
        code("guess = predict(blocks=None)", "predict"),
        code("blocks = -(-33 // BLOCK_SIZE)\nprint(blocks)", "experiment", prints="3\n"),
        code("observe(guess, blocks=blocks)", prints="blocks  3\n"),
    ]
    for section in SECTIONS:
        cells.append(new_markdown_cell(f"## {section.capitalize()}\n\nWords.\n\n<details>An answer.</details>"))
    notebook = new_notebook(cells=cells, metadata=METADATA)
    for position, cell in enumerate(cells):
        cell.id = f"cell-{position}"
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    return nbformat.from_dict(notebook)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one lesson's folder and one source file of three lines."""
    (tmp_path / "notebooks" / "1_concepts").mkdir(parents=True)
    (tmp_path / "engine.py").write_text("a = 1\nb = 2\nc = 3\n")
    return tmp_path


def page(notebook: NotebookNode, root: Path, folder: str = "notebooks/1_concepts") -> Page:
    return Page(notebook, root / folder / "01_blocks.ipynb", root)


def test_a_good_notebook_has_no_breach(root: Path) -> None:
    assert breaches(page(good_notebook(), root)) == []


def set_code(source: str, *tags: str) -> Callable[[NotebookNode], None]:
    """A change that replaces the code of the experiment cell, and its tags if any are given."""

    def change(notebook: NotebookNode) -> None:
        notebook.cells[4].source = source
        if tags:
            notebook.cells[4].metadata["tags"] = list(tags)

    return change


def set_output(mime: str, text: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        notebook.cells[4].outputs = [new_output("display_data", data={mime: text})]

    return change


def edit(position: int, old: str, new: str) -> Callable[[NotebookNode], None]:
    """A change that replaces text in one cell; it fails if the text is not there, so no case goes stale."""

    def change(notebook: NotebookNode) -> None:
        cell = notebook.cells[position]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return change


def store_error(notebook: NotebookNode) -> None:
    notebook.cells[4].outputs = [new_output("error", ename="E", evalue="", traceback=[])]


def clear_outputs(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []


def ignore_outputs(notebook: NotebookNode) -> None:
    for cell in notebook.cells[4:6]:
        cell.metadata["tags"] = ["timing", "nbval-ignore-output"]


def swap_sections(notebook: NotebookNode) -> None:
    notebook.cells[-1], notebook.cells[-2] = notebook.cells[-2], notebook.cells[-1]


BAD: list[tuple[str, Callable[[NotebookNode], object]]] = [
    ("is_valid", lambda nb: nb.cells[4].pop("outputs")),
    ("is_valid", lambda nb: nb.cells[4].update(id=nb.cells[3].id)),
    ("metadata_is_bare", lambda nb: nb.metadata.update(widgets={})),
    ("metadata_is_bare", lambda nb: nb.metadata.kernelspec.update(name=".venv")),
    ("metadata_is_bare", lambda nb: nb.cells[4].metadata.update(collapsed=True)),
    ("is_small", set_output("text/html", "x" * 100_001)),
    ("is_small", lambda nb: nb.cells[0].update(source=INTRODUCTION + "x" * 300_000)),
    ("was_run_top_to_bottom", lambda nb: nb.cells[4].update(execution_count=None)),
    ("was_run_top_to_bottom", lambda nb: nb.cells[4].update(execution_count=7)),
    ("something_is_compared", clear_outputs),
    ("few_outputs_are_ignored", ignore_outputs),
    ("few_outputs_are_ignored", set_code("1", "nbval-ignore-output")),
    ("no_error_is_stored", store_error),
    ("outputs_are_portable", set_output("image/svg+xml", "<svg><!-- Created with matplotlib --></svg>")),
    ("outputs_are_portable", set_output("application/vnd.jupyter.widget-view+json", "{}")),
    ("no_trace_of_a_machine", set_output("text/plain", "saved to /home/ada/model.gguf")),
    ("no_trace_of_a_machine", set_output("text/html", "<a href='file://model'>")),
    ("no_trace_of_a_machine", set_output("text/plain", r"C:\Users\ada")),
    ("no_trace_of_a_machine", set_output("text/plain", "<Block object at 0x7f21c0ffee00>")),
    ("no_trace_of_a_machine", set_code("open('/tmp/trace.json')")),
    ("no_trace_of_a_machine", edit(0, "Needs", "Look into /content/drive. Needs")),
    ("tags_are_known", set_code("1", "raises-exception")),
    ("tags_are_known", set_code("1", "nbval-skip")),
    ("tags_are_known", set_code("# NBVAL_IGNORE_OUTPUT\n1")),
    ("setup_cell_is_first", edit(1, "seed=0", "seed=1")),
    ("no_cell_is_empty", set_code(" ")),
    ("no_cell_is_empty", set_code("# Words in the wrong\n\n# kind of cell.")),
    ("no_trailing_semicolon", set_code("plt.plot(x);")),
    ("code_is_comparable", set_code("clear_output(wait=True)")),
    ("code_is_comparable", set_code("widgets.interact(f, x=3)")),
    ("code_is_comparable", set_code("with widgets.Output():\n    print(1)")),
    ("code_is_comparable", set_code("%timeit 1 + 1")),
    ("code_is_comparable", set_code("%%time\n1 + 1")),
    ("code_is_comparable", set_code("!ls")),
    ("code_is_comparable", set_code("import subprocess")),
    ("code_is_comparable", set_code("from tqdm import tqdm")),
    ("code_is_comparable", set_code("print(torch.__version__)")),
    ("code_is_comparable", set_code("os.getpid()")),
    ("code_is_comparable", set_code("this is no Python")),
    ("links_resolve", edit(0, "Needs", "See [next](02_missing.ipynb). Needs")),
    ("introduction_is_complete", edit(0, "# Blocks", "Blocks")),
    ("introduction_is_complete", edit(0, "Needs", "# A second title\n\nNeeds")),
    ("introduction_is_complete", edit(0, "colab-badge", "badge")),
    ("introduction_is_complete", edit(0, "- count blocks\n- free them\n", "")),
    ("introduction_is_complete", edit(0, "- free them", "- b\n- c\n- d\n- e")),
    ("introduction_is_complete", edit(0, "five minutes", "patience")),
    *[("sections_are_there", edit(6 + i, f"## {s.capitalize()}", "## Other")) for i, s in enumerate(SECTIONS)],
    ("sections_are_there", swap_sections),
    ("parameters_follow_setup", lambda nb: nb.cells[2].metadata.pop("tags")),
    ("parameters_follow_setup", set_code("1", "parameters")),
    ("a_fast_run_is_possible", edit(2, "; fast: 4", "")),
    ("a_fast_run_is_possible", edit(2, "fast: 4", "fast: four")),
    ("a_fast_run_is_possible", edit(2, "BLOCK_SIZE = 16", "BLOCK_SIZE = (\n16)")),
    ("predictions_are_open", edit(3, "None", "3")),
    ("predictions_are_open", edit(3, "predict(blocks=None)", "None")),
    ("predictions_are_open", lambda nb: nb.cells[3].metadata.pop("tags")),
    ("experiments_are_short", set_code("x = 1\n" * 16)),
    ("answers_are_hidden", edit(-2, "<details>", "")),
]


@pytest.mark.parametrize("name, spoil", BAD, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BAD)])
def test_a_bad_notebook_is_rejected(name: str, spoil: Callable[[NotebookNode], object], root: Path) -> None:
    notebook = deepcopy(good_notebook())
    spoil(notebook)
    assert list(RULES[name](page(notebook, root)))


def test_every_rule_has_a_notebook_that_it_rejects() -> None:
    assert {name for name, _ in [*BAD, *BAD_EXERCISES]} == set(RULES)


HINTS = "<details><summary>Hint 1: a</summary></details>\n\n<details><summary>Hint 2: b</summary></details>"


def good_exercise() -> NotebookNode:
    cells = [
        new_markdown_cell(INTRODUCTION.replace("Needs", "10 minutes · difficulty ●○○ · after that. Needs")),
        code(SETUP_CELL, "setup", prints="device: cpu\n"),
        code("def double(x):\n    return 2 * x", "exercise"),
        code("verdict = check(double)\nverdict", "check", prints="passed"),
        new_markdown_cell(HINTS),
        code("twice = verdict.use()\ntwice(3)", prints="6"),
    ]
    notebook = new_notebook(cells=cells, metadata=METADATA)
    for position, cell in enumerate(cells):
        cell.id = f"cell-{position}"
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    return nbformat.from_dict(notebook)


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
def test_a_good_exercise_has_no_breach(folder: str, root: Path) -> None:
    assert breaches(page(good_exercise(), root, folder)) == []


BAD_EXERCISES: list[tuple[str, Callable[[NotebookNode], object]]] = [
    ("introduction_is_complete", edit(0, "difficulty ●○○ · ", "")),
    ("introduction_is_complete", edit(0, "difficulty ●○○", "difficulty ○○○")),
    ("introduction_is_complete", edit(0, "- count blocks\n- free them\n", "")),
    ("tasks_are_complete", lambda nb: nb.cells[2].metadata.pop("tags")),
    ("tasks_are_complete", lambda nb: nb.cells[3].metadata.pop("tags")),
    ("tasks_are_complete", lambda nb: nb.cells.insert(3, new_markdown_cell("Words."))),
    ("tasks_are_complete", lambda nb: nb.cells.__delitem__(slice(3, None))),
    ("tasks_are_complete", lambda nb: nb.cells.pop(4)),
    ("tasks_are_complete", edit(4, "Hint 2", "Hint 3")),
    ("tasks_are_complete", edit(4, "<details><summary>Hint 2: b</summary></details>", "")),
    ("answers_are_checked_before_use", edit(5, "twice(3)", "double(3)")),
    ("answers_are_checked_before_use", edit(5, "twice = ", "double = ")),
]


@pytest.mark.parametrize("name, spoil", BAD_EXERCISES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BAD_EXERCISES)])
def test_a_bad_exercise_is_rejected(name: str, spoil: Callable[[NotebookNode], object], root: Path) -> None:
    notebook = deepcopy(good_exercise())
    spoil(notebook)
    assert list(RULES[name](page(notebook, root, "exercises")))


@pytest.mark.parametrize(
    "text",
    [
        "[up](../../engine.py) and [a line](../../engine.py#L3)",
        f"[a line]({REPOSITORY}/blob/main/engine.py#L1-L3)",
        "[elsewhere](https://example.org/missing) `[code](missing.md)`\n```\n[fenced](missing.md)\n```",
        '<a href="../../README.md#The-Idea:-blocks">read</a>',
    ],
)
def test_good_links(text: str, root: Path) -> None:
    (root / "README.md").write_text("# Title\n\n## The idea: `blocks`\n")
    assert list(broken_links(text, root / "notebooks" / "1_concepts" / "01.ipynb", root)) == []


@pytest.mark.parametrize(
    "link",
    [
        "missing.md",
        "../../engine.py#L4",
        "../../README.md#nothing",
        "#nothing",
        "/engine.py",
        f"{REPOSITORY}/blob/main/missing.py",
        f"{REPOSITORY.replace('github.com', 'colab.research.google.com/github')}/blob/main/missing.ipynb",
    ],
)
def test_broken_links(link: str, root: Path) -> None:
    (root / "README.md").write_text("# Title\n")
    lesson = root / "notebooks" / "1_concepts" / "01.ipynb"
    nbformat.write(new_notebook(), lesson)
    assert len(list(broken_links(f"[text]({link}) ![image]({link})", lesson, root))) == 2
