"""Run every lesson with its parameters turned down, to see that it still runs: ``make fast``.

    python tools/run_fast.py [notebooks/<stage>/NN_name.ipynb ...]

A parameter's comment may end in the value for such a run, as a Python literal:

    NUM_PROMPTS = 32  # prompts in the experiment; fast: 4

papermill injects these values after the cell tagged ``parameters``, as it does for a sweep. Nothing is compared: other
parameters give other numbers. That is also what it is good for, since it finds a cell that only works with the numbers
of the page. The executed copies go to ``build/fast/``.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import Any

import nbformat
import papermill

ROOT = Path(__file__).resolve().parent.parent
MARK = "fast:"


def fast_parameters(code: str) -> dict[str, Any]:
    """Name -> fast value, of those assignments in a parameters cell that have one.

    Raises:
        ValueError: a value is no Python literal, or does not stand behind an assignment.
    """
    names = {node.lineno: node.targets[0].id for node in ast.parse(code).body
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT or MARK not in token.string:
            continue
        value = token.string.rpartition(MARK)[2].strip()
        try:
            found[names[token.start[0]]] = ast.literal_eval(value)
        except (KeyError, ValueError, SyntaxError):
            raise ValueError(f"{token.line.strip()!r}: after '{MARK}' comes a Python literal, on the line of an "
                             "assignment") from None
    return found


def parameters_cell(path: Path) -> str:
    """The code of a notebook's cell tagged ``parameters``, or ""."""
    cells = nbformat.read(path, as_version=4).cells
    return next((cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), "")


def run(path: Path, result: Path) -> None:
    """Execute one notebook with its fast parameters.

    Raises:
        papermill.PapermillExecutionError: a cell failed.
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    papermill.execute_notebook(path, result, parameters=fast_parameters(parameters_cell(path)), cwd=path.parent,
                               kernel_name="python3", progress_bar=False, extra_arguments=["--log-level=ERROR"])


def main(arguments: list[str]) -> int:
    """Run the notebooks named, or all lessons; 1 if one fails."""
    chosen = [Path(argument).resolve() for argument in arguments] or sorted((ROOT / "notebooks").rglob("*.ipynb"))
    failed = 0
    for path in chosen:
        print(f"{path.relative_to(ROOT)} {fast_parameters(parameters_cell(path))}", flush=True)
        try:
            run(path, ROOT / "build" / "fast" / path.relative_to(ROOT))
        except papermill.PapermillExecutionError as error:
            print(error, file=sys.stderr)
            failed += 1
    print(f"{len(chosen) - failed} of {len(chosen)} ran to the end")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
