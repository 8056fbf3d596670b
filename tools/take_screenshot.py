"""Take the README's screenshot: a notebook in JupyterLab, in which a real model has just answered.

    python tools/take_screenshot.py

It needs Chromium (see tests/browser) and the default model.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.chromium import open_browser  # noqa: E402
from tests.browser.jupyter import jupyterlab, open_notebook, output, run_all, write_notebook  # noqa: E402

SCREENSHOT = ROOT / "docs" / "images" / "player.png"
CELLS = [
    """
from tutorial_engine import LLM, SamplingParams
from tutorial_engine.viz import block_table, watch

llm = LLM(num_gpu_blocks_override=24, max_num_seqs=3, max_model_len=256)
""",
    """
librarian = {"role": "system", "content": "You are a friendly librarian. Answer every question in one short sentence, "
                                          "and use simple words that a child knows. Do not explain anything."}
questions = ["Who wrote Hamlet?", "What do bees make?", "Where is Paris?", "Name a fruit."]

with watch(llm, block_table):
    llm.chat([[librarian, {"role": "user", "content": question}] for question in questions],
             SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
""",
]


def main() -> int:
    """Run the notebook, open a step in the middle, and keep the picture, in few colours so that it stays small."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_notebook(folder / "watch.ipynb", CELLS)
        with jupyterlab(folder) as address, open_browser(folder / ".profile", height=840) as tab:
            open_notebook(tab, address, "watch.ipynb")
            run_all(tab)
            player = f"{output(1)}?.querySelector('[data-on]')"
            tab.wait(f"{player}?.querySelector('svg')", patience=300)
            tab.hover(f"{player}.querySelector('[data-b=\"2\"]')")
            tab.js(f"{player}.scrollIntoView({{block: 'end'}})")
            tab.screenshot(folder / "page.png")
        Image.open(folder / "page.png").convert("RGB").quantize(64).save(SCREENSHOT, optimize=True)
    print(f"{SCREENSHOT.relative_to(ROOT)}: {SCREENSHOT.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
