"""Pictures of a recorded run. Each is drawn from a `trace.Trace`, never from the live engine.

Owns: what a picture looks like. Does not own: recording (`trace.py`).
"""

from tutorial_engine.viz.block_table import Picture, block_table

__all__ = ["Picture", "block_table"]
