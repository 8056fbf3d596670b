"""A check never raises, whatever a learner wrote, and its message says what was tried, what came back, what to look at.
"""

import html
import itertools
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tutorial_engine import checks
from tutorial_engine.checks import Answer, Check, Result, check, same, show


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@check(blocks_needed)
def check_blocks_needed(answer: Answer) -> None:
    """A half-filled
    block counts."""
    answer(16, 16).gives(1, "a full block.")
    answer(17, block_size=16).gives(2, "the last block.")


class Counter:
    """The course's own: counts, down to 0 only."""

    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        if self.n + k < 0:
            raise ValueError("below 0")
        self.n += k
        return self.n


@check(Counter)
def check_counter(answer: Answer) -> None:
    counter = answer.make("counter")
    for n in range(12):
        counter.call("add", 1).gives(n + 1, "adding")
    counter.call("add", -99).raises(ValueError, "below 0")
    counter.call("add", 0).must(lambda value: 0 < value < 99, "what was there before", "a refused call")


def expecting(want: Any) -> Check:
    """A check of a function without arguments that must return `want`."""

    @check(blocks_needed)
    def body(answer: Answer) -> None:
        answer().gives(want, "the value.")

    return body


def message(result: Result) -> str:
    """The text of a result that did not pass, both forms of which must agree."""
    assert not result
    text, page = repr(result), html.unescape(re.sub("</?code>", "`", result._repr_html_()))
    assert result.look_at and result.look_at in page and result.look_at in " ".join(text.split())
    assert all(line in page and line in text for line in result.lines)
    return text


def test_passing_says_what_it_means() -> None:
    result = check_blocks_needed(blocks_needed)
    assert result and repr(result) == "✓ blocks_needed: passed\n    2 expectations met. A half-filled block counts."
    assert "Look at" not in result._repr_html_()


def test_the_first_wrong_value_ends_it() -> None:
    assert message(check_blocks_needed(lambda num_tokens, block_size: num_tokens // block_size)) == (
        "✗ blocks_needed: not yet\n    blocks_needed(17, block_size=16)\n        returned 1\n        expected 2\n"
        "    Look at: the last block.")  # fmt: skip


def test_a_gap_is_to_do() -> None:
    def gap(num_tokens: int, block_size: int) -> int:
        raise NotImplementedError("Round <up>.")

    result = check_blocks_needed(gap)
    assert result.status == "to do" and "Not written yet: Round <up>." in message(result)
    assert "Round &lt;up&gt;." in result._repr_html_() and "<code>raise NotImpl" in result._repr_html_()


def test_somebody_elses_gap_is_an_error() -> None:
    """torch raises NotImplementedError too."""
    result = check_blocks_needed(lambda num_tokens, block_size: torch.nn.Module()(num_tokens))
    assert result.status == "not yet" and "raised NotImplementedError: Module [Module] is missing" in message(result)


def forever(*_: Any) -> None:
    while True: pass  # noqa: E701 - on one line it is a jump of an instruction to itself


def stubborn(*_: Any) -> None:
    while True:
        try:  # noqa: SIM105
            forever.no_such_thing  # noqa: B018
        except:  # noqa: E722
            pass


def talkative(*_: Any) -> None:
    while True:
        print("and on", "and on")


def endless(*_: Any) -> Any:
    yield from itertools.count()


def deep(*arguments: Any) -> Any:
    return deep(*arguments)


class Hostile:
    """Can be neither compared, nor shown, nor asked for anything."""

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise MemoryError

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)


BAD: list[tuple[Any, str]] = [
    (lambda *_: None, "returned None"),
    (lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero"),
    (lambda *_: sys.exit(3), "raised SystemExit: 3"),
    (lambda *_: undefined, "raised NameError: name 'undefined' is not defined"),  # type: ignore[name-defined]  # noqa
    (lambda: 1, "the first line of the function"),
    (lambda n, b: float(-(-n // b)), "The number is right, but it is a float."),
    (lambda *_: "1", "returned '1'"),
    (lambda *_: True, "returned True"),
    (lambda *_: [1] * 10**6, "returned [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...]"),
    (lambda *_: "x" * 10**6, "returned 'xxxxx"),
    (lambda *_: np.zeros((2, 3)), "returned ndarray of shape (2, 3)"),
    (lambda *_: torch.zeros(2), "returned Tensor of shape (2,): [0.0, 0.0]"),
    (lambda *_: object(), "returned <object object>"),
    (endless, "That is an iterator"),
    (forever, "did not come to an end in 0.2 seconds"),
    (stubborn, "did not come to an end"),
    (talkative, "did not come to an end"),
    (deep, "where the function calls itself"),
    (lambda *_: Hostile(), "cannot be looked at: OSError: tolist"),
    (Hostile, "the first line of the function"),
    (Hostile(), "cannot be looked at"),
    (None, "blocks_needed is None, not something that can be called."),
    (46_080, "A check gets the name alone, without brackets."),
]


@pytest.mark.parametrize("bad, says", BAD, ids=range(len(BAD)))
def test_nothing_gets_out(bad: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                          ) -> None:
    if "come to an end" in says:
        monkeypatch.setattr(checks, "TIME_LIMIT_S", 0.2)
    began = time.monotonic()
    result = check_blocks_needed(bad)
    said = message(result)
    assert says in said.replace("\n    ", " ") and " at 0x" not in said and len(said) < 1500
    assert time.monotonic() - began < 20
    assert len(capsys.readouterr().out) < checks.MAX_PRINTED + 100


def test_the_stop_button_still_works() -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_blocks_needed(stopped)


def test_what_a_learner_prints_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def debugging(num_tokens: int, block_size: int) -> int:
        print(f"{num_tokens=}")
        return blocks_needed(num_tokens, block_size)

    assert check_blocks_needed(debugging)
    assert capsys.readouterr().out == "num_tokens=16\nnum_tokens=17\n"


def test_the_line_that_failed_is_quoted() -> None:
    def broken(num_tokens: int, block_size: int) -> int:
        rest = [num_tokens, block_size]
        return rest[2]

    assert "in the line: return rest[2]" in message(check_blocks_needed(broken))


def test_arguments_are_copies() -> None:
    @check(blocks_needed)
    def body(answer: Answer) -> None:
        case = [3, 4]
        answer(case).gives(4, "")
        answer(case).gives(4, "the second call gets the same list.")

    assert body(lambda values: values.pop())


def test_history_of_an_object() -> None:
    class Bad(Counter):
        def add(self, k: int) -> int:
            self.n += k
            return super().add(0)

    assert check_counter(Counter)
    assert message(check_counter(Bad)).splitlines()[1:] == [
        "    counter = Counter()",
        "    ...",
        *(f"    counter.add(1)  # {n}" for n in range(9, 13)),
        "    counter.add(-99)  # ValueError",
        "    counter.add(0)",
        "        raised ValueError: below 0",
        '        in the line: raise ValueError("below 0")',
        "    Look at: that line, with the arguments above: which of its values is not what you expect? print()",
        "    may help.",
    ]


@pytest.mark.parametrize("bad, says", [
    (type("NoMethod", (), {}), "there is no method add"),
    (type("NotAMethod", (), {"add": 3}), "there is no method add"),
    (type("Silent", (Counter,), {"add": lambda self, k: self.n if k < 0 else Counter.add(self, k)}),
     "counter.add(-99)\n        returned 12\n        expected it to raise ValueError"),
    (type("OtherError", (Counter,), {"add": lambda self, k: {}[k] if k < 0 else Counter.add(self, k)}),
     "raised KeyError: -99\n        expected it to raise ValueError"),
    (type("BadInit", (), {"__init__": lambda self: self.nothing}), "counter = Counter()\n        raised Attrib"),
    (lambda: None, "there is no method add"),
], ids=range(6))  # fmt: skip
def test_bad_objects(bad: Callable[..., Any], says: str) -> None:
    assert says in message(check_counter(bad))


def test_a_condition_that_cannot_be_asked_is_not_met() -> None:
    @check(blocks_needed)
    def body(answer: Answer) -> None:
        answer().must(lambda value: len(value) == 3, "three values", "how many there are.")

    assert body(lambda: [1, 2, 3])
    assert "expected three values" in message(body(lambda: None)) and "expected three values" in message(body(list))


def test_use_hands_out_the_learners_or_the_courses(capsys: pytest.CaptureFixture[str]) -> None:
    def mine(num_tokens: int, block_size: int) -> int:
        return (num_tokens + block_size - 1) // block_size

    assert check_blocks_needed(mine).use() is mine
    assert check_blocks_needed(forever.__init__).use() is blocks_needed
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "From here on: your own blocks_needed.", "From here on: the course's blocks_needed"]


@pytest.mark.parametrize("got, want", [
    (3, 3), (np.int64(3), 3), (torch.tensor(3), 3), (1 / 3, 0.33333333), (2, 2.0), (True, True), (np.bool_(True), True),
    ("a", "a"), (None, None), ([1, 2], [1, 2]), ((1, 2), [1, 2]), (range(3), [0, 1, 2]), (np.arange(3), [0, 1, 2]),
    ([np.int64(1), [2.0]], [1, [2.0]]), ({"a": 1.0}, {"a": 1.0 + 1e-9}), ({1, 2}, {2, 1}),
    (torch.tensor([1.00001, 2]), torch.tensor([1.0, 2])), (np.ones((2, 1)), torch.ones(2, 1)),
])  # fmt: skip
def test_same(got: object, want: object) -> None:
    assert same(got, want)


@pytest.mark.parametrize("got, want", [
    (3.0, 3), (True, 1), (1, True), ("3", 3), (None, 0), (0, None), (0.3334, 1 / 3), ([1, 2], [1, 2, 3]), ([1], 1),
    ([1, 2.0], [1, 2]), ({"a": 1}, {"b": 1}), ([], None), (float("nan"), 1.0), (torch.ones(2), torch.ones(2, 1)),
    ([1.0, 2.0], torch.tensor([1.0, 2.0])), (torch.tensor([1.01]), torch.tensor([1.0])),
])  # fmt: skip
def test_not_same(got: object, want: object) -> None:
    assert not same(got, want)
    text = message(expecting(want)(lambda: got))
    assert f"returned {show(got)}" in text and f"expected {show(want)}" in text


@pytest.mark.parametrize("got, want, remark", [
    ([1, 2], [1, 2, 3], "There are 2 values, expected 3."),
    ([1, 9, 9], [1, 2, 3], "The first difference is at position 1: 9, expected 2."),
    (torch.ones(3, 2), torch.ones(2, 3), "The shape is (3, 2), expected (2, 3)."),
    (map(abs, [1]), [1], "That is an iterator"),
    (None, 3, "None is what comes back without a `return`"),
    (3.0, 3, "// divides whole numbers"),
])  # fmt: skip
def test_remarks(got: object, want: object, remark: str) -> None:
    assert remark in message(expecting(want)(lambda: got))


@pytest.mark.parametrize(("value", "shown"), [
    (0.1 + 0.2, "0.3"), ([1 / 3, 2.0], "[0.333333, 2.0]"), (0.25, "0.25"), (1e-12 / 3, "3.33333e-13"),
    (float("nan"), "nan"), (-float("inf"), "-inf"), (123456.75, "123456.75"), (1e22, "1e+22"),
])
def test_floats_are_shown_as_people_write_them(value: object, shown: str) -> None:
    assert show(value) == shown
