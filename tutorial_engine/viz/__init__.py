"""Pictures of a recorded run. Each is drawn from a `trace.Trace`, never from the live engine.

    block_table       who holds which block, and each request's table
    batch_occupancy   who is in which step, and what it computes there
    memory_map        who was in which block when, and how much memory was wasted
    timeline          how long each request queued, its TTFT and its ITLs
    watch             shows such pictures while an engine runs
    knobs             runs a small simulation again whenever a setting is changed

A view called with a trace gives a player of all steps; with a step, a picture of that one. Two more pictures are drawn
from plain numbers: `acceptance` (speculative decoding) and `roofline`.
Owns: what a picture looks like. Does not own: recording (`trace.py`), simulating (`simulation.py`).
"""

from tutorial_engine.viz.acceptance import acceptance
from tutorial_engine.viz.block_table import block_table
from tutorial_engine.viz.knobs import knobs
from tutorial_engine.viz.memory_map import memory_map
from tutorial_engine.viz.occupancy import batch_occupancy
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.roofline import roofline
from tutorial_engine.viz.timeline import request_times, timeline
from tutorial_engine.viz.watch import watch

__all__ = ["Picture", "acceptance", "batch_occupancy", "block_table", "knobs", "memory_map", "request_times",
           "roofline", "timeline", "watch"]
