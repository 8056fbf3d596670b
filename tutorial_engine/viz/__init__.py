"""Pictures of a recorded run. Each is drawn from a `trace.Trace`, never from the live engine.

Owns: what a picture looks like. Does not own: recording (`trace.py`).
"""

from tutorial_engine.viz.block_table import block_table
from tutorial_engine.viz.occupancy import batch_occupancy
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.watch import watch

__all__ = ["Picture", "batch_occupancy", "block_table", "watch"]
