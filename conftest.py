"""Pytest settings that hold for the tests and the notebooks alike."""

from typing import Any

NOT_COMPARED = ("stderr",)  # warnings and progress bars: they differ between versions, and the build leaves them out


def pytest_collectstart(collector: Any) -> None:
    """Tell nbval's notebook collectors which outputs are not compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += NOT_COMPARED
