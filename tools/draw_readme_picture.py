"""Take the README's picture out of the getting-started notebook, where it is the stored output of a real run.

    python tools/draw_readme_picture.py

The notebook's outputs are compared with a fresh run by ``make test``, and ``tests/viz`` compares the README's picture
with the notebook's: what the README shows is what the engine does.
"""

import base64
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "3_running_locally" / "05_getting_started.ipynb"
PICTURE = ROOT / "docs" / "images" / "block_table.svg"


def first_picture(notebook: Path = NOTEBOOK) -> str:
    """The SVG text of the notebook's first picture.

    Raises:
        ValueError: it has none, so it was not built with its outputs.
    """
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            if found := re.match(r'<img [^>]*src="data:image/svg\+xml;base64,([^"]+)"', page):  # no player
                return base64.b64decode(found[1]).decode() + "\n"
    raise ValueError(f"{notebook} has no stored picture: run `make notebooks` first")


def main() -> int:
    """Write the picture."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(first_picture(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} is the first picture of {NOTEBOOK.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
