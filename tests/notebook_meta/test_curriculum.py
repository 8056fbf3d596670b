"""Every objective is shown or practised by some cell, every requirement is met by some lesson, and the page says so."""

import pytest

from tools.write_curriculum import DOCUMENT, REQUIREMENTS, Lesson, read_course, write

LESSONS = read_course()


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path)
def test_each_objective_is_carried_by_an_experiment_or_an_exercise(lesson: Lesson) -> None:
    assert lesson.objectives
    assert sorted(lesson.carriers) == list(range(1, len(lesson.objectives) + 1))


def test_each_requirement_is_met_and_each_number_is_one() -> None:
    assert set.union(*(lesson.requirements for lesson in LESSONS)) == set(REQUIREMENTS)


def test_the_page_is_what_the_script_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == write(LESSONS), "run: python tools/write_curriculum.py"
