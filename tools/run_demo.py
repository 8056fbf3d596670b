"""Run the getting-started notebook for real and show what it generated: the second half of ``make demo``.

The executed copy goes to ``build/demo/``; the committed notebook is not touched. Cells tagged ``demo-output`` are
the ones whose printed text is repeated in the terminal.
"""

import sys
from pathlib import Path

import papermill
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "3_running_locally" / "05_getting_started.ipynb"
RESULT = ROOT / "build" / "demo" / NOTEBOOK.name
TAG = "demo-output"


def generated_text(notebook: NotebookNode) -> str:
    """What the cells tagged ``demo-output`` printed, in order; empty if there is no such cell or it printed nothing."""
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code" and TAG in cell.metadata.get("tags", [])
        for output in cell.outputs
    ]
    texts = [
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in outputs
        if output.get("name") != "stderr"
    ]
    return "\n".join(text.rstrip("\n") for text in texts if text.strip())


def main() -> int:
    """Execute, then report; 1 if a cell fails or nothing was generated."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    print(f"running {NOTEBOOK.relative_to(ROOT)} ...", flush=True)
    try:
        notebook = papermill.execute_notebook(
            NOTEBOOK, RESULT, cwd=NOTEBOOK.parent, kernel_name="python3", extra_arguments=["--log-level=ERROR"]
        )
    except papermill.PapermillExecutionError as error:
        print(f"{error}\nThe notebook as far as it came: {RESULT}", file=sys.stderr)
        return 1
    text = generated_text(notebook)
    if not text:
        print(f"the notebook ran, but no cell tagged {TAG!r} printed anything: {RESULT}", file=sys.stderr)
        return 1
    print(f"\nThe model wrote:\n\n{text}\n\nThe executed notebook: {RESULT}\nOpen it with: make lab")
    return 0


if __name__ == "__main__":
    sys.exit(main())
