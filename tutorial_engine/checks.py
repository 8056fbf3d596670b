"""Checks for exercises: look at what a learner wrote, and say what to look at next.

    blocks_needed(17, 16)     called under guard, with arguments that the message can repeat
    returned 1, expected 2    the first expectation that fails ends the check
    Look at: ...              and each expectation brings its own advice

A check returns a `Result`, which shows itself, and never raises: a notebook must run to its end with every exercise
still unwritten. Whatever the learner's code does (errors, endless loops, a value of the wrong kind) becomes a message.
Only one thing is left to the notebook's stop button: a single call that never comes back to Python, such as
`sum(itertools.count())`.

Owns: calling a learner's code, comparing, wording. Does not own: the exercises (`exercises/`) and what they expect.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import html
import io
import math
import re
import reprlib
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TIME_LIMIT_S = 5.0  # for a whole check, which takes milliseconds if nothing is wrong
MAX_PRINTED = 2_000  # characters that a learner's code may print while it is checked
MAX_HISTORY = 8  # lines of calls that a message repeats


class _Endless(BaseException):
    """The learner's code ran for too long. No `Exception`, so that `except Exception` does not hold it."""


class _NotWritten(Exception):
    """The call came to the gap that the exercise began with."""


class _Mistake(Exception):
    """An expectation that was not met. Args: what happened, in lines; what to look at."""

    def __init__(self, lines: list[str], look_at: str) -> None:
        super().__init__(lines, look_at)
        self.lines, self.look_at = lines, look_at


# ---------------------------------------------------------------------- what a check hands back


@dataclass(frozen=True, eq=False)
class Result:
    """What a check found. It is true if the check passed, and shows itself as text or HTML.

    Attributes:
        name: of the learner's function or class.
        status: "passed", "not yet" or "to do".
        lines: what happened. look_at: advice; empty if the check passed.
        answer, reference: the learner's object, and the course's own.
    """

    name: str
    status: str
    lines: tuple[str, ...]
    look_at: str
    answer: Any
    reference: Any

    def __bool__(self) -> bool:
        return self.status == "passed"

    def use(self) -> Any:
        """The learner's object if it passed, else the course's own; prints which. Give it a new name, so that this
        check goes on looking at the learner's."""
        if self:
            print(f"From here on: your own {self.name}.")
            return self.answer
        print(f"From here on: the course's {self.name}, so that you can go on. Yours takes over once it passes.")
        return self.reference

    def __repr__(self) -> str:
        advice = textwrap.wrap(f"Look at: {self.look_at}", 100) if self.look_at else []
        return "\n".join([f"{_SIGNS[self.status][0]} {self.name}: {self.status}",
                          *(f"    {line}" for line in [*self.lines, *advice])])

    def _repr_html_(self) -> str:
        sign, color = _SIGNS[self.status]
        look_at = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self.look_at))
        advice = f"<div><b>Look at:</b> {look_at}</div>" if look_at else ""
        story = html.escape("\n".join(self.lines))
        font = "font-family: monospace; " if self.status == "not yet" else "font-family: inherit; "
        return (f'<div style="border-left: 5px solid {color}; padding: 2px 12px; text-align: left">'
                f'<div><b><span style="color: {color}">{sign}</span> {html.escape(self.name)}: {self.status}</b></div>'
                f'<pre style="{font}margin: 4px 0; white-space: pre-wrap; word-break: normal">{story}</pre>'
                f"{advice}</div>")


_SIGNS = {"passed": ("✓", "#0072b2"), "not yet": ("✗", "#d55e00"), "to do": ("○", "#767676")}


class Check:
    """Calls a learner's function or class and returns a `Result`; never raises, except when the learner presses stop.

    Attributes:
        name: of the function or class that it is about. reference: the course's own.
    """

    def __init__(self, body: Callable[[Answer], None], reference: Callable[..., Any]) -> None:
        self.body, self.reference, self.name = body, reference, reference.__name__
        self.__doc__ = body.__doc__
        self.proves = " ".join((body.__doc__ or "").split())

    def __call__(self, thing: Any) -> Result:
        answer = Answer(thing, self.name)
        try:
            with _guarded():
                if not callable(thing):
                    raise _Mistake([f"{self.name} is {show(thing)}, not something that can be called."],
                                   f"the cell that defines {self.name}: run it again, then this one. A check gets "
                                   "the name alone, without brackets.")
                self.body(answer)
        except KeyboardInterrupt:
            raise
        except _NotWritten as gap:
            return self._result(thing, "to do", [f"Not written yet: {gap}"],
                                "the line `raise NotImplementedError(...)`. Put your code in its place, run that cell, "
                                "then this one.")
        except _Mistake as mistake:
            return self._result(thing, "not yet", mistake.lines, mistake.look_at)
        except _Endless:
            return self._result(thing, "not yet", [*_last(answer.calls),
                                                   f"    did not come to an end in {TIME_LIMIT_S:g} seconds"],
                                "your loops. Is there one whose condition never changes?")
        except BaseException as error:  # the last resort: an object that cannot even be compared or shown
            return self._result(thing, "not yet", [*_last(answer.calls),
                                                   f"    cannot be looked at: {_error(error)}"],
                                "what comes back: is it of the kind that the exercise asks for?")
        return self._result(thing, "passed", [f"{answer.count} expectations met. {self.proves}"], "")

    def _result(self, thing: Any, status: str, lines: list[str], look_at: str) -> Result:
        return Result(self.name, status, tuple(lines), look_at, thing, self.reference)


def check(reference: Callable[..., Any]) -> Callable[[Callable[[Answer], None]], Check]:
    """Decorator: make a check out of a function that takes an `Answer` and states what it expects of it.

    The function's docstring says what it means to pass, in one sentence. `reference` is the course's own answer; its
    name is the name that the learner's must have.
    """
    return lambda body: Check(body, reference)


# ---------------------------------------------------------------------- the learner's side


class Answer:
    """A learner's function or class. Call it with a case, and say what it must give.

        answer(17, 16).gives(2, "the last block: one token is enough to need it")
        pool = answer.make("pool", 4)                       a class: an object, whose calls are remembered
        pool.call("allocate", 2).gives([0, 1], "the order")

    Attributes:
        count: expectations met so far. calls: the calls so far, as code.
    """

    def __init__(self, thing: Any, name: str) -> None:
        self.thing, self.name = thing, name
        self.count = 0
        self.calls: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Returned:
        self.calls = [f"{self.name}({_arguments(args, kwargs)})"]
        return Returned(self, self.thing, args, kwargs)

    def make(self, variable: str, *args: Any, **kwargs: Any) -> Instance:
        """An object of the learner's class; messages call it `variable`."""
        self.calls = [f"{variable} = {self.name}({_arguments(args, kwargs)})"]
        made = Returned(self, self.thing, args, kwargs)
        return Instance(self, variable, made.value)


class Instance:
    """An object of a learner's class. Its calls add up to a history, which messages repeat."""

    def __init__(self, answer: Answer, variable: str, value: Any) -> None:
        self.answer, self.variable, self.value = answer, variable, value

    def call(self, method: str, *args: Any, **kwargs: Any) -> Returned:
        calls = self.answer.calls
        calls.append(f"{self.variable}.{method}({_arguments(args, kwargs)})")
        bound = getattr(self.value, method, None)
        if not callable(bound):
            raise _Mistake([*_last(calls), f"    there is no method {method}"],
                           f"the methods of {self.answer.name}, and how they are spelled.")
        return Returned(self.answer, bound, args, kwargs)


class Returned:
    """One call that was made: a value, or an error that counts as a mistake unless it was expected."""

    def __init__(self, answer: Answer, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self._answer, self._value = answer, None
        self._history = list(answer.calls)
        self.error: Exception | SystemExit | None = None
        try:
            self._value = call(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # copies: the case stays what it was
        except (Exception, SystemExit) as error:
            if isinstance(error, NotImplementedError) and _is_own(error):
                raise _NotWritten(str(error)) from None
            self.error = error

    @property
    def value(self) -> Any:
        """What came back."""
        if self.error is not None:
            raise self._mistake([f"    raised {_error(self.error)}", *_where(self.error)], _advice(self.error))
        return self._value

    def gives(self, want: Any, look_at: str) -> None:
        """Expect this value. Floats and tensors need to be close; an int must not be a float."""
        if not same(self.value, want):
            raise self._mistake([f"    returned {show(self.value)}", f"    expected {show(want)}",
                                 *_remarks(self.value, want)], look_at)
        self._met(f"  # {show(want)}")

    def must(self, hold: Callable[[Any], Any], expected: str, look_at: str) -> None:
        """Expect that `hold(value)` is true. `expected`: the same in words. An error in `hold` counts as false."""
        value = self.value
        with contextlib.suppress(Exception):
            if hold(value):
                return self._met(f"  # {show(value)}")
        raise self._mistake([f"    returned {show(value)}", f"    expected {expected}", *_remarks(value, ...)], look_at)

    def works(self) -> None:
        """Expect nothing but that it is not an error."""
        _ = self.value
        self._met("")

    def raises(self, kind: type[Exception], look_at: str) -> None:
        """Expect an error of this kind."""
        if not isinstance(self.error, kind):
            what = f"returned {show(self._value)}" if self.error is None else f"raised {_error(self.error)}"
            raise self._mistake([f"    {what}", f"    expected it to raise {kind.__name__}"], look_at)
        self._met(f"  # {kind.__name__}")

    def _met(self, note: str) -> None:
        """Count, and note in the history what came back."""
        self._answer.count += 1
        self._answer.calls[len(self._history) - 1] += note

    def _mistake(self, lines: list[str], look_at: str) -> _Mistake:
        return _Mistake([*_last(self._history), *lines], look_at)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """End what does not end by itself, and cut off what is printed."""
    learner, finished = threading.get_ident(), threading.Event()

    def watch() -> None:
        pause = TIME_LIMIT_S
        while not finished.wait(pause):  # again and again: a bare `except:` may have held the last one
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(learner), ctypes.py_object(_Endless))
            pause = 0.05

    watchdog = threading.Thread(target=watch, daemon=True)
    if not _is_debugged():  # whoever steps through a function takes longer, and has a stop button
        watchdog.start()
    try:
        with contextlib.redirect_stdout(_Short(sys.stdout)):
            yield
    finally:
        finished.set()
        if watchdog.ident is not None:
            watchdog.join()


def _is_debugged() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12's way for debuggers; before, they traced
    return sys.gettrace() is not None or (monitoring is not None and bool(monitoring.get_tool(monitoring.DEBUGGER_ID)))


class _Short(io.TextIOBase):
    """Passes on what a learner prints, up to a limit."""

    def __init__(self, target: Any) -> None:
        self.target, self.left = target, MAX_PRINTED

    def write(self, text: str) -> int:
        if self.left > 0:
            self.target.write(text[:self.left])
            self.left -= len(text)
            if self.left <= 0:
                self.target.write("\n... (your code prints more than is shown)\n")
        return len(text)


# ---------------------------------------------------------------------- comparing


def same(got: Any, want: Any, tolerance: float = 1e-6) -> bool:
    """Whether a learner's value is the expected one: exactly; floats to six digits, those of arrays to four."""
    if _is_array(want):
        return _is_array(got) and tuple(got.shape) == tuple(want.shape) and same(got.tolist(), want.tolist(), 1e-4)
    got = _plain(got)
    if isinstance(want, bool) or want is None or isinstance(want, str):
        return type(got) is type(want) and got == want
    if isinstance(want, int):
        return isinstance(got, int) and not isinstance(got, bool) and got == want
    if isinstance(want, float):
        return isinstance(got, int | float) and math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance / 10)
    if isinstance(want, list | tuple):
        return isinstance(got, list | tuple) and len(got) == len(want) and all(
            same(a, b, tolerance) for a, b in zip(got, want))
    if isinstance(want, dict):
        return isinstance(got, dict) and got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)
    return bool(got == want)


def show(value: Any) -> str:
    """One value, in one short line that is the same in every run."""
    if _is_array(value) and value.ndim:
        return f"{type(value).__name__} of shape {tuple(value.shape)}: {show(value.tolist())}"
    text = _REPR.repr(_plain(value))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(text.split()))


class _Repr(reprlib.Repr):
    """Short; a float to six digits if it is close to that, since 0.30000000000000004 is nobody's answer."""

    def repr_float(self, value: float, level: int) -> str:
        rounded = float(f"{value:.6g}")
        return repr(rounded if math.isclose(value, rounded, rel_tol=1e-9) or len(repr(value)) > 9 else value)


_REPR = _Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = 12
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 120


def _is_array(value: Any) -> bool:
    """A numpy array or a torch tensor, without importing either."""
    return hasattr(value, "tolist") and hasattr(value, "shape") and hasattr(value, "ndim")


def _plain(value: Any) -> Any:
    """Numpy's and torch's values, and ranges, as Python's own numbers and lists."""
    if isinstance(value, range):
        return list(value[:10_000])
    return value.tolist() if _is_array(value) else value


def _remarks(got: Any, want: Any) -> list[str]:
    """What a hurried reader may miss in the difference between two values; `want` is ... if it is a condition."""
    value, found = _plain(got), []
    if value is None and want is not None:
        found.append("None is what comes back without a `return`; print does not return anything.")
    elif hasattr(value, "__next__"):
        found.append("That is an iterator, which holds no values yet: list(...) makes a list of it.")
    elif isinstance(value, float) and isinstance(want, int) and value == want:
        found.append("The number is right, but it is a float. // divides whole numbers and keeps them whole.")
    elif _is_array(want) and _is_array(got) and tuple(got.shape) != tuple(want.shape):
        found.append(f"The shape is {tuple(got.shape)}, expected {tuple(want.shape)}.")
    elif isinstance(want, list | tuple) and isinstance(value, list | tuple):
        if len(value) != len(want):
            found.append(f"There are {len(value)} values, expected {len(want)}.")
        elif len(want) > 1:
            i = next(i for i in range(len(want)) if not same(value[i], want[i]))
            found.append(f"The first difference is at position {i}: {show(value[i])}, expected {show(want[i])}.")
    return [f"    {remark}" for remark in found]


def _last(calls: list[str]) -> list[str]:
    """The calls that led here: the first, and if there are many, the last ones."""
    return calls if len(calls) <= MAX_HISTORY else [calls[0], "...", *calls[2 - MAX_HISTORY:]]


def _arguments(args: tuple, kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())])


def _error(error: BaseException) -> str:
    """An error's kind and first line."""
    try:
        first = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error).partition("\n")[0])
    except Exception:
        first = ""
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error came from, without this file's frame, which is the first; the next one is the learner's."""
    return traceback.extract_tb(error.__traceback__)[1:]


def _is_own(error: BaseException) -> bool:
    """Whether the learner's own code raised it, and not something that it called."""
    frames = _frames(error)
    return bool(frames) and frames[-1].filename == frames[0].filename


def _where(error: BaseException) -> list[str]:
    """The learner's line that an error came from."""
    frames = _frames(error)
    own = [frame.line for frame in frames if frame.filename == frames[0].filename and frame.line]
    return [f"    in the line: {own[-1].strip()}"] if own else []


def _advice(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "where the function calls itself: what makes it stop?"
    if isinstance(error, TypeError) and "argument" in str(error):
        return "the first line of the function: its arguments must be those of the exercise, in the same order."
    if isinstance(error, NameError):
        return "the spelling of that name, and whether the cell that defines it has been run."
    return "that line, with the arguments above: which of its values is not what you expect? print() may help."
