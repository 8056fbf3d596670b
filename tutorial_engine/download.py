"""`python -m tutorial_engine.download`: fetch the default model now, so that everything works offline later."""

from __future__ import annotations

import argparse
import sys
import time

from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models.default_model import DEFAULT_MODEL, default_model_path


def main() -> int:
    """Fetch the default model unless it is already there, check it, and print where it is. Returns an exit code."""
    description = "Fetch the tutorial's default model, or check the copy that is already on this machine."
    argparse.ArgumentParser(prog="python -m tutorial_engine.download", description=description).parse_args()
    start = time.perf_counter()
    try:
        path = default_model_path()
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{DEFAULT_MODEL} is at {path} (checked; {time.perf_counter() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
