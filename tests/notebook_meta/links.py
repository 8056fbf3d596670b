"""Find links in markdown that lead nowhere. Only links into this project are followed; the web is left alone."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat

from tools.build_notebooks import REPOSITORY

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_TARGET = re.compile(r"""\]\(\s*<?([^)\s>]+)>?(?:\s+"[^"]*")?\s*\)|(?:src|href)=["']([^"']+)["']""")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_LINE = re.compile(r"L(\d+)(?:-L(\d+))?")
_OWN_PAGES = (
    f"{REPOSITORY}/blob/main/",
    f"{REPOSITORY}/tree/main/",
    REPOSITORY.replace("https://github.com/", "https://colab.research.google.com/github/") + "/blob/main/",
)


def broken_links(markdown: str, page: Path, root: Path) -> Iterator[str]:
    """One message for each link in ``markdown`` (part of the file ``page``) whose target is missing."""
    for match in _TARGET.finditer(_CODE.sub("", _FENCE.sub("", markdown))):
        link = match[1] or match[2]
        own = next((link.removeprefix(prefix) for prefix in _OWN_PAGES if link.startswith(prefix)), None)
        if own is None and re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue  # another site, mailto:, data:
        path, _, anchor = (own if own is not None else link).partition("#")
        if path.startswith("/"):
            yield f"{link} starts at the root of a disk: write it relative to this page"
            continue
        target = (root if own is not None else page.parent) / unquote(path) if path else page
        if not target.exists():
            yield f"{link} leads to nothing"
        elif anchor and not _has_anchor(target, unquote(anchor)):
            yield f"{link}: the file is there, the place in it is not"


def _has_anchor(target: Path, anchor: str) -> bool:
    if line := _LINE.fullmatch(anchor):
        return int(line[2] or line[1]) <= len(target.read_text(encoding="utf-8").splitlines())
    return _slug(anchor) in {_slug(heading) for heading in _headings(target)}


@cache
def _headings(target: Path) -> tuple[str, ...]:
    if target.suffix == ".ipynb":
        cells = nbformat.read(target, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = target.read_text(encoding="utf-8")
    return tuple(_HEADING.findall(_FENCE.sub("", text)))


def _slug(heading: str) -> str:
    """The anchor of a heading. GitHub writes it in lower case and JupyterLab does not: case is not compared."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
