"""The notebook helpers, alone and inside a real kernel that a build starts and nbval replays."""

import os
import subprocess
import sys

import pytest

from tutorial_engine.notebook import Observation, compare, expect_error, is_live, observe, predict, show_source


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter: setup() changes the whole process."""
    dropped = {"PYTEST_CURRENT_TEST", "OMP_NUM_THREADS", "TUTORIAL_LIVE", "TRANSFORMERS_VERBOSITY"}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, capture_output=True, text=True, timeout=240
    )


def test_replay_is_told_by_pytest_or_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUTORIAL_LIVE", raising=False)
    assert not is_live()  # pytest is running this
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert is_live()
    monkeypatch.setenv("TUTORIAL_LIVE", "0")
    assert not is_live()
    monkeypatch.setenv("TUTORIAL_LIVE", "1")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "a test")
    assert is_live()


SEEDED = """
import os, sys
from tutorial_engine.notebook import setup
assert "torch" not in sys.modules
setup(seed=3)
import random, numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item())
print(torch.get_num_threads(), os.environ["TRANSFORMERS_VERBOSITY"])
"""


def test_setup_seeds_everything_and_prints_one_line() -> None:
    first, second = run(SEEDED, TUTORIAL_LIVE="0"), run(SEEDED, TUTORIAL_LIVE="0")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    device, numbers, settings = first.stdout.splitlines()
    assert device.startswith("device: ")
    assert len(set(numbers.split())) == 3
    assert settings == "1 error"


def test_setup_leaves_what_the_user_has_set() -> None:
    result = run(SEEDED, OMP_NUM_THREADS="2", TRANSFORMERS_VERBOSITY="info")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "2 info"


BARS = """
from tutorial_engine.notebook import setup
setup()
from tqdm import tqdm
from tqdm.auto import tqdm as auto
for bar in (tqdm, auto):
    for _ in bar(range(3), desc="counting", disable=False):
        pass
"""


@pytest.mark.parametrize("live", ["0", "1"])
def test_progress_bars_are_for_people(live: str) -> None:
    result = run(BARS, TUTORIAL_LIVE=live)
    assert result.returncode == 0, result.stderr
    assert ("counting" in result.stderr) == (live == "1")


def test_expected_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with expect_error(ValueError):
        int("ten")
    assert capsys.readouterr().out == "ValueError: invalid literal for int() with base 10: 'ten'\n"


def test_a_subclass_prints_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    with expect_error(LookupError):
        {}["key"]
    assert capsys.readouterr().out == "KeyError: 'key'\n"


def test_what_was_noted_on_an_error_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    with expect_error(ValueError):
        error = ValueError("bad")
        error.add_note("It was the second one.")
        raise error
    assert capsys.readouterr().out == "ValueError: bad\nIt was the second one.\n"


def test_no_error_where_one_is_expected_is_an_error() -> None:
    with pytest.raises(AssertionError, match="should have raised ValueError"), expect_error(ValueError):
        pass


def test_another_error_passes_through() -> None:
    with pytest.raises(TypeError), expect_error(ValueError):
        len(3)  # type: ignore[arg-type]


def test_observation_without_guesses() -> None:
    table = observe(predict(blocks_used=None, fits=None), blocks_used=1234, fits=True)
    assert repr(table) == "             yours  measured\nblocks used  –      1,234\nfits         –      True"
    assert table._repr_html_().count("<tr>") == 3


@pytest.mark.parametrize(
    "guess, measured, verdict",
    [
        (3, 3, "✓"),
        (3, 4, "✗"),
        (1234, 1235, "✗"),  # counts are compared exactly
        (0.3333, 1 / 3, "✓"),  # floats to three digits
        (0.33, 1 / 3, "✗"),
        (2, 2.0, "✓"),
        (1500, 1500.4, "✓"),
        ("stop", "stop", "✓"),
        ("stop", "length", "✗"),
        ("many", 3.5, "✗"),
        ([1, 2], [1, 2], "✓"),
        (None, 3, ""),
    ],
)
def test_verdict(guess: object, measured: object, verdict: str) -> None:
    assert Observation({"x": (guess, measured)}).rows[0][-1] == verdict


def test_numpy_and_torch_scalars_look_like_numbers() -> None:
    import numpy as np
    import torch

    table = Observation({"a": (None, np.float32(0.12345)), "b": (7, torch.tensor(7))})
    assert table.rows == [("a", "–", "0.123", ""), ("b", "7", "7", "✓")]


def test_html_is_escaped() -> None:
    assert "<script>" not in observe({"x": "<script>"}, x="<b>")._repr_html_()


def test_predicting_one_thing_and_measuring_another_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"predicted \['blocks'\], measured \['steps'\]"):
        observe(predict(blocks=None), steps=3)


def test_published_numbers_beside_ours() -> None:
    table = compare(paper={"13B": 15.7, "a<b": 9}, our_own={"a<b": 9.5678, "13B": 12345.6})
    assert repr(table).splitlines() == ["     paper  our own", "13B  15.7   12,300", "a<b  9      9.57"]
    assert "<td" in table._repr_html_() and "a&lt;b" in table._repr_html_()
    for wrong in ({}, {"paper": {}}, {"paper": {"a": 1}, "ours": {"b": 1}}):
        with pytest.raises(ValueError, match="needs the same rows in each column"):
            compare(**wrong)


class Shown:
    def method(self) -> list[int]:
        """Something to print."""
        first_number, second_number = 1, 2  # a comment that is so long that the whole line does not fit a page any more
        return [first_number, second_number, first_number + second_number, first_number * second_number, first_number]


def test_source_is_shown_without_indent_and_fits_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    show_source(Shown.method)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "def method(self) -> list[int]:",
        '    """Something to print."""',
        "    # a comment that is so long that the whole line does not fit a page any more",
        "    first_number, second_number = 1, 2",
        "    return [first_number, second_number, first_number + second_number, first_number * second_number,",
        "        first_number]"]
    show_source(Shown.method, only=("Something",))
    assert capsys.readouterr().out == '"""Something to print."""\n'
    with pytest.raises(ValueError, match="'gone' is in no line of Shown.method"):
        show_source(Shown.method, only=("Something", "gone"))
    with pytest.raises(TypeError, match="only must be a tuple"):
        show_source(Shown.method, only="Something")
