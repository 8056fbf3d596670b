"""Write docs/curriculum.md from the tags of the course's cells: ``python tools/write_curriculum.py``.

A cell that carries the second objective of its lesson is tagged ``objective-2``; the objectives are the bullets of the
lesson's first cell. A cell that answers a requirement of the course is tagged with its number, ``R120``; the
requirements are listed here. ``tests/notebook_meta/test_curriculum.py`` fails if an objective or a requirement is
carried by nothing, or if the document is not what this script writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "curriculum.md"
OBJECTIVE, REQUIREMENT = re.compile(r"objective-([1-9])"), re.compile(r"R[1-9]\d*")

REQUIREMENTS = {
    "R14": "one `SamplingParams` for all prompts, or a list with one for each",
    "R19": "defaults come from the model's `generation_config.json`; `generation_config=\"vllm\"` does without",
    "R21": "explicit `SamplingParams` win, and fields that they leave unset are vLLM's neutral ones, not the file's",
    "R25": "`max_tokens` is 16 unless it is given; look at `finish_reason`",
    "R26": "there is no `batch_size`: the scheduler decides anew in each step",
    "R27": "a list puts everything into the waiting queue, a loop has one request at a time",
    "R28": "what a finished request gives back admits a waiting one at once",
    "R33": "what each sampling parameter does",
    "R34": "with `n > 1` the completions share the prompt's blocks",
    "R42": "which kernel computes attention, and when to choose it by hand",
    "R43": "`max_model_len` against concurrency",
    "R52": "the same prompts as a loop and as a list, measured",
    "R56": "a sequential baseline that counts its tokens correctly",
    "R110": "reproducibility: seeds, and what else a result depends on",
    "R120": "how much memory naive reservation wastes (published: 60 to 80 %)",
    "R121": "where \"three to four times faster than sequential\" comes from, and what it depends on",
    "R122": "the gain grows with the batch and with the length of the outputs",
    "R123": "alone, a request is hardly faster than in a plain loop",
    "R124": "prompts of different lengths need no padding",
    "R125": "copy-on-write of the paper's blocks, and why vLLM's V1 engine does without",
    "R131": "why the batch can change a token",
    "R140": "same model, same prompt, another output: the ways it happens",
    "R148": "different sampling for each prompt of a call",
    "R150": "which defaults hold when fields are unset",
    "R171": "one request at a time against a batch; idle hardware; cost of a million tokens",
    "R174": "why K and V; bytes per token; with and without a cache; growth; grouped queries",
    "R175": "bound by compute or by bandwidth; roofline; TTFT and ITL; chunked prefill",
    "R176": "kinds of fragmentation; block table; paged attention = dense attention; block size",
    "R177": "static and iteration-level batching; occupancy; who blocks whom",
    "R178": "from logits to a token; each knob; what logprobs mean; determinism",
}

INTRODUCTION = """\
# What the course teaches, and where

Each lesson begins with what you will be able to do. Here stands, for each of these objectives, which experiments show
it and which exercises practise it; below, for each requirement of the course, which lessons meet it. Both are read from
the tags of the notebooks' cells.
"""


@dataclass
class Lesson:
    """path: of the notebook, from the root. carriers: number of an objective -> headings with the file that each is
    in, a path from the root. requirements: their numbers."""

    path: str
    title: str
    objectives: list[str]
    carriers: dict[int, dict[str, str]] = field(default_factory=dict)
    requirements: set[str] = field(default_factory=set)


def read_course(root: Path = ROOT) -> list[Lesson]:
    """All lessons in reading order, with what their cells, and those of their exercises, are tagged with."""
    lessons = []
    for path in sorted((root / "notebooks").rglob("[0-9]*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        first = notebook.cells[0].source
        title = first.partition("\n")[0].removeprefix("# ")
        bullets = re.findall(r"^- (.+?)[;.]?$", re.sub(r"\n  +", " ", first), re.MULTILINE)
        lesson = Lesson(path.relative_to(root).as_posix(), title, bullets)
        _collect(lesson, notebook, "### ", lesson.path)
        exercise = root / "exercises" / path.relative_to(root / "notebooks")
        if exercise.exists():
            _collect(lesson, nbformat.read(exercise, as_version=4), "## ", exercise.relative_to(root).as_posix())
        lessons.append(lesson)
    return lessons


def _collect(lesson: Lesson, notebook: NotebookNode, level: str, path: str) -> None:
    heading = lesson.title
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            found = re.findall(rf"^(?:{level}|## )(.+)", cell.source, re.MULTILINE)
            heading = found[-1] if found else heading
        for tag in cell.metadata.get("tags", []):
            if match := OBJECTIVE.fullmatch(tag):
                lesson.carriers.setdefault(int(match[1]), {})[heading] = path
            elif REQUIREMENT.fullmatch(tag):
                lesson.requirements.add(tag)


def write(lessons: list[Lesson]) -> str:
    pages = [INTRODUCTION]
    for lesson in lessons:
        rows = [f"| {objective} | {_links(lesson, number, 'notebooks')} | {_links(lesson, number, 'exercises')} |"
                for number, objective in enumerate(lesson.objectives, 1)]
        stage = lesson.path.split("/")[1].replace("_", " ")
        pages.append("\n".join([f"## [{lesson.title}](../{lesson.path})", "", f"*Stage {stage}.* You will be able to",
                                "", "| | shown in | practised in |", "|---|---|---|", *rows, ""]))
    rows = []
    for number, words in REQUIREMENTS.items():
        carriers = [f"[{lesson.title}](../{lesson.path})" for lesson in lessons if number in lesson.requirements]
        rows.append(f"| {number} | {words} | {', '.join(carriers)} |")
    pages.append("\n".join(["## Requirements", "", "| number | what | lessons |", "|---|---|---|", *rows, ""]))
    return "\n".join(pages)


def _links(lesson: Lesson, number: int, folder: str) -> str:
    return "<br>".join(f"[{heading}](../{path})" for heading, path in lesson.carriers.get(number, {}).items()
                       if path.startswith(folder))


if __name__ == "__main__":
    DOCUMENT.write_text(write(read_course()), encoding="utf-8")
    print(DOCUMENT.relative_to(ROOT))
