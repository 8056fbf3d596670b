"""The planted faults are still faults: each names one place of today's source, and tests that are there.

That the tests find them is shown by `make mutation`, which takes too long to be a test itself.
"""

import ast
import shutil
from pathlib import Path

import pytest

from tools.mutation_check import FAULTS, ROOT, Fault, plant


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_names_one_place_and_makes_valid_python(fault: Fault, tmp_path: Path) -> None:
    (tmp_path / fault.file).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tutorial_engine" / fault.file, tmp_path / fault.file)
    plant(fault, tmp_path)
    changed, right = ((folder / fault.file).read_text() for folder in (tmp_path, ROOT / "tutorial_engine"))
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(right))  # not a mere comment


@pytest.mark.parametrize("test", sorted({test for fault in FAULTS for test in fault.tests}))
def test_named_tests_exist(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function or 'test_'}" in (ROOT / path).read_text()


def test_names_are_distinct() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 10
