"""What every notebook of the course starts with, and the few helpers its cells share.

Owns the look of a cell's output: seeds, threads, print options, which progress bars are shown, and the
predict -> measure loop. Owns nothing of the engine, and imports none of it. The rule behind all of it is that a cell
prints the same text on every machine, because the stored output of each notebook is compared with a fresh run:

    live    a person runs the cell          progress bars, moving pictures, all cores
    replay  a build or a test runs it       no bars, the final picture once, one thread
"""

import html
import inspect
import os
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

NO_GUESS = "–"


def is_live() -> bool:
    """True when a person is watching, False when a build or a test replays the notebook.

    ``TUTORIAL_LIVE=0`` or ``1`` decides where it is set; otherwise a kernel started by pytest is a replay.
    """
    asked = os.environ.get("TUTORIAL_LIVE")
    return asked != "0" if asked else "PYTEST_CURRENT_TEST" not in os.environ


def setup(seed: int = 0) -> None:
    """Make the notebook's numbers repeatable and its output quiet, then print which device it runs on.

    Call it in the first cell: thread and logging settings reach torch and transformers only before they are imported.

    Args:
        seed: for ``random``, ``numpy.random`` and ``torch``.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import numpy as np
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        # One thread sums in one order, whatever the number of cores: replayed floats agree with the stored ones.
        torch.set_num_threads(_usable_cores() if is_live() else 1)
    if not is_live():
        _hide_progress_bars()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    np.set_printoptions(precision=4, suppress=True, linewidth=120)
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=120)
    print(f"device: cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "device: cpu")


_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep: spinning ones slow down everything else on a small machine
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers warns whenever a cell forks
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
}


def _usable_cores() -> int:
    """Physical cores this process may use; a core's second hardware thread adds nothing to a matrix product."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _hide_progress_bars() -> None:
    """Disable every tqdm bar made from now on, whichever library makes it: bars print rates, and no two runs agree."""
    import tqdm

    make_bar = tqdm.tqdm.__init__

    def make_hidden_bar(bar: tqdm.tqdm, *args: Any, **kwargs: Any) -> None:
        make_bar(bar, *args, **{**kwargs, "disable": True})

    tqdm.tqdm.__init__ = make_hidden_bar


@contextmanager
def expect_error(kind: type[Exception]) -> Iterator[None]:
    """Run a block that must fail with ``kind``, and print the error instead of stopping the notebook.

    >>> with expect_error(ZeroDivisionError):
    ...     1 / 0
    ZeroDivisionError: division by zero

    Raises:
        AssertionError: the block finished without an error. An error of another kind passes through unchanged.
    """
    try:
        yield
    except kind as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n")
    else:
        raise AssertionError(f"this block should have raised {kind.__name__}, but it ran without an error")


def predict(**guesses: Any) -> dict[str, Any]:
    """Write down what you expect before you measure it: ``guess = predict(blocks=12)``. ``None`` means no guess."""
    return guesses


def observe(guesses: Mapping[str, Any], **measured: Any) -> "Observation":
    """Put measured values beside the guesses: ``observe(guess, blocks=len(table))`` as a cell's last line.

    Raises:
        ValueError: the names are not exactly the ones that ``predict`` was given.
    """
    if set(guesses) != set(measured):
        raise ValueError(
            f"predict() and observe() must name the same things: predicted {sorted(guesses)}, "
            f"measured {sorted(measured)}"
        )
    return Observation({name: (guesses[name], measured[name]) for name in guesses})


def compare(**columns: Mapping[str, Any]) -> "Table":
    """Published numbers beside one's own: ``compare(paper={"13B": 15.7}, ours={"13B": 15.73})`` as a cell's last line.

    Args:
        columns: what stands above a column -> {row: value}. Floats are shown to three significant digits.

    Raises:
        ValueError: no column, or two that have not the same rows.
    """
    rows = list(next(iter(columns.values()), ()))
    if not rows or any(set(column) != set(rows) for column in columns.values()):
        raise ValueError("compare(paper={...}, ours={...}) needs the same rows in each column, got "
                         + "; ".join(f"{name}: {sorted(column)}" for name, column in columns.items()))
    return Table(("", *(_words(name) for name in columns)),
                 [(_words(row), *(_show(_plain(column[row])) for column in columns.values())) for row in rows])


def show_source(thing: Callable[..., Any], only: Sequence[str] = ()) -> None:
    """Print the source of a function, method or class that is running, without its indentation.

    Lines of more than 100 characters are broken, so that a page of a notebook need not be scrolled sideways.

    Args:
        only: print lines that contain one of these pieces of text, and no others.

    Raises:
        TypeError: `only` is one string. ValueError: one of its pieces is in no line: the source has changed.
    """
    if isinstance(only, str):
        raise TypeError(f"only must be a tuple of pieces of text, got the string {only!r}.")
    lines = inspect.getsource(thing).splitlines()
    for piece in only:
        if not any(piece in line for line in lines):
            raise ValueError(f"{piece!r} is in no line of {thing.__qualname__}.")
    chosen = [line for line in lines if not only or any(piece in line for piece in only)]
    is_prose = False  # inside of a docstring
    for line in textwrap.dedent("\n".join(chosen)).splitlines():
        print("\n".join(_broken(line, is_prose or line.lstrip().startswith('"""'))))
        is_prose ^= line.count('"""') % 2 == 1


MAX_COLUMNS = 100


def _broken(line: str, is_prose: bool = False) -> list[str]:
    """A line in pieces; of code, the second and further ones are indented by four more. Comments go above it."""
    if len(line) <= MAX_COLUMNS:
        return [line]
    indent = line[:len(line) - len(line.lstrip())]
    code, hash_sign, comment = line.partition("  # ")
    if hash_sign and code.strip() and not is_prose:
        return [*_broken(f"{indent}# {comment}"), *_broken(code)]
    further = indent + ("" if is_prose else "# " if line.lstrip().startswith("# ") else "    ")
    return textwrap.wrap(line, MAX_COLUMNS, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


class Table:
    """A small table that shows itself, as HTML in a notebook and as text in a terminal.

    Attributes:
        header: one cell for each column. rows: the same for each row; all cells are text.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.header, self.rows = tuple(header), list(map(tuple, rows))

    def __repr__(self) -> str:
        table = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        style = 'style="text-align: left; padding: 2px 16px 2px 0"'
        head = "".join(f"<th {style}>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td {style}>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"


class Observation(Table):
    """A table "yours / measured". Floats are shown, and compared, to three significant digits."""

    def __init__(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(("", "yours", "measured", ""),
                         [(_words(name), *_compare(*pair)) for name, pair in pairs.items()])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _compare(guess: Any, measured: Any) -> tuple[str, str, str]:
    """(guess, measured, verdict) as text; the verdict is empty where there is no guess."""
    guess, measured = _plain(guess), _plain(measured)
    if guess is None:
        return NO_GUESS, _show(measured), ""
    if isinstance(guess, int | float) and isinstance(measured, int | float) and float in {type(guess), type(measured)}:
        agree = _show(float(guess)) == _show(float(measured))
    else:
        agree = guess == measured
    return _show(guess), _show(measured), "✓" if agree else "✗"


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as the Python number it holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _show(value: Any) -> str:
    """One value as text: floats to three significant digits, thousands separated."""
    if isinstance(value, float):
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
