"""Colours and type of every picture, for light and dark pages.

The colours of requests are those that Okabe and Ito chose for the colour-blind ("Color Universal Design", 2008):
lighter on a light page, where the text on them is black, darker on a dark one, where it is white. Whatever a colour
says is also said by a number or a word in or beside it.

The same rules dress a picture wherever it is. As an image it follows the reader's system (`prefers-color-scheme`);
inside a page it also follows the theme of JupyterLab, Colab or VS Code, whatever the system says.
"""

# paper, ink, grey ink, lines, faint fill, then six colours of requests
LIGHT = ("#ffffff", "#1a1a1a", "#595959", "#c4c4c4", "#ececec",
         "#74c3ec", "#f2b134", "#4fc3a1", "#dd9cbf", "#f3e868", "#ee9a5b")  # fmt: skip
DARK = ("#1b1e22", "#f4f4f4", "#b8b8b8", "#565c63", "#2f343a",
        "#0261cd", "#915f0a", "#014f37", "#ae2e7c", "#786638", "#602e01")  # fmt: skip
NAMES = ("p", "i", "g", "l", "f", "0", "1", "2", "3", "4", "5")
NUM_COLORS = 6

# What a request does in a step -> its colour.
PREFILL, DECODE, CACHED, RECOMPUTE = 0, 2, 4, 5


def _theme(colors: tuple[str, ...]) -> str:
    return ".te{" + ";".join(f"--{name}:{color}" for name, color in zip(NAMES, colors)) + "}"


def _in_pages(selectors: str, theme: str) -> str:
    return ",".join(f"{selector} .te" for selector in selectors.split()) + theme.removeprefix(".te")


# t: title, h: heading, s: line of text, n: large number, b: bold, g: grey; p0 ... p5: filled with a colour; c: a box,
# l: pale, d: dashed, z: faint, w: hatched, u: solid grey, o: solid ink, k: a line of ink, bg: the paper.
SHAPES = (
    ".te text{font:10px Helvetica,Arial,sans-serif;fill:var(--i);text-anchor:middle}"
    ".te .t{font-size:15px;font-weight:bold;text-anchor:start}.te .h,.te .s{font-size:12px;text-anchor:start}"
    ".te .h,.te .g{fill:var(--g)}.te .n{font-size:15px}.te .b{font-weight:bold}"
    ".te text.e{text-anchor:end}"
    ".te .bg{fill:var(--p)}.te .c{fill:var(--p);stroke:var(--g);stroke-width:1.2}.te .z{fill:var(--f);stroke:var(--l)}"
    ".te .l{stroke:var(--l)}.te .d{stroke-dasharray:3 2}.te .k{stroke:var(--i);fill:none}"
    ".te .u{fill:var(--l)}.te .o{fill:var(--i)}"
    ".te .w{fill:url(#te-w);stroke:var(--l)}.te .wl{stroke:var(--g)}"
    + "".join(f".te .p{n}{{fill:var(--{n})}}" for n in range(NUM_COLORS)))  # fmt: skip

IMAGE_CSS = _theme(LIGHT) + f"@media(prefers-color-scheme:dark){{{_theme(DARK)}}}" + SHAPES
PAGE_CSS = (_theme(LIGHT) + f"@media(prefers-color-scheme:dark){{{_theme(DARK)}}}"
            + _in_pages("[data-jp-theme-light=true] html[theme=light] .vscode-light", _theme(LIGHT))
            + _in_pages("[data-jp-theme-light=false] html[theme=dark] .vscode-dark", _theme(DARK)) + SHAPES)
