"""The glossary is in order, and agrees with the lessons: they use its words, and it has the words that they define.

That its links lead somewhere is tested with those of all other pages, in test_notebooks.py.
"""

import re
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

from tools.build_notebooks import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
PARAGRAPH = re.compile(r"\*\*(?P<names>[^*]+)\*\*: .+?\n(?P<near>No lesson has it yet; near it is |→ )"
                       r"\[[^]]+\]\(\.\./(?P<lesson>notebooks/[^)]+\.ipynb)\)(?: · \[[^]]+\]\([^)]+\))?", re.DOTALL)
LESSONS = {path.relative_to(ROOT).as_posix(): nbformat.read(path, as_version=4)
           for path in sorted((ROOT / "notebooks").rglob("[0-9]*.ipynb"))}


class Entry(NamedTuple):
    letter: str  # the heading that it stands under
    names: list[str]
    lesson: str
    explained: bool  # False: no lesson has the word yet


def read_glossary(page: Path = GLOSSARY) -> list[Entry]:
    entries, letter = [], ""
    for paragraph in page.read_text(encoding="utf-8").strip().split("\n\n")[2:]:  # title, introduction
        if paragraph.startswith("## "):
            letter = paragraph.removeprefix("## ")
        else:
            match = PARAGRAPH.fullmatch(paragraph)
            assert match, f"not of the form that an entry has: {paragraph}"
            entries.append(Entry(letter, match["names"].split(" · "), match["lesson"], match["near"] == "→ "))
    return entries


def uses(lesson: str, names: list[str]) -> bool:
    text = " ".join(" ".join(cell.source for cell in LESSONS[lesson].cells).split())
    return any(re.search(rf"\b{re.escape(name)}", text, re.IGNORECASE) for name in names)


def defined_terms(lesson: str) -> list[str]:
    """What stands in bold in the tables of "The idea", right of the first column, which is the comparison's."""
    ideas = [cell.source for cell in LESSONS[lesson].cells if cell.source.startswith("## The idea")]
    cells = [cell for row in re.findall(r"^\|(.+)\|$", "\n".join(ideas), re.MULTILINE) for cell in row.split("|")[1:]]
    return [term.lower() for cell in cells for term in re.findall(r"\*\*(.+?)\*\*", cell)]


ENTRIES = read_glossary()


def test_alphabetical_under_the_right_letters_and_each_name_once() -> None:
    first = [re.sub(r"[^a-z0-9]+", " ", entry.names[0].lower()) for entry in ENTRIES]
    assert first == sorted(first)
    assert [entry.letter.lower() for entry in ENTRIES] == [name[0] for name in first]
    names = [name.lower() for entry in ENTRIES for name in entry.names]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.names[0])
def test_the_lesson_that_an_entry_links_to_uses_its_word(entry: Entry) -> None:
    if entry.explained:
        assert uses(entry.lesson, entry.names)
    else:
        assert [lesson for lesson in LESSONS if uses(lesson, entry.names)] == [], "there is a lesson now: link to it"


def test_terms_that_lessons_define_have_an_entry() -> None:
    terms = {lesson: defined_terms(lesson) for lesson in LESSONS}
    assert len(set().union(*terms.values())) > 20, "the tables have another form now: is anything still compared?"
    names = {name.lower() for entry in ENTRIES for name in entry.names}
    missing = [(lesson, term) for lesson, found in terms.items() for term in found
               if term not in names and term.removesuffix("s") not in names]
    assert missing == []
