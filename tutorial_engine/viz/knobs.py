"""`knobs`: turn a setting of the engine, see at once what becomes of the batch and the memory.

    knobs()                                 as a cell's last line: four knobs above two pictures
    knobs(jobs, max_num_seqs=4)             with jobs of your own, and more arguments of the engine

Each turn runs `simulate` again (the real scheduler and block manager, no model), which takes some hundredths of a
second. The widgets keep to what ipywidgets 7.7 can do, since that is what Colab has. Where nobody is there to turn
anything, the pictures of the first setting are shown.

Owns: the widgets. Does not own: the simulation (`simulation.py`), the pictures.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tutorial_engine.notebook import is_live
from tutorial_engine.trace import Names, Trace
from tutorial_engine.viz.memory_map import memory_map
from tutorial_engine.viz.occupancy import batch_occupancy
from tutorial_engine.viz.picture import Picture

if TYPE_CHECKING:
    from tutorial_engine.simulation import Job

# What the knob says -> arguments of `simulate`.
POLICIES: dict[str, dict[str, Any]] = {
    "first come, first served": {},
    "priority: short prompts first": {"scheduling_policy": "priority"},
    "static batches": {"static": True},
}
WIDGET = "application/vnd.jupyter.widget-view+json"


def knobs(jobs: Sequence[Job] | None = None, *, block_size: int = 16, num_blocks: int = 33, rate: float = 20.0,
          policy: str = "first come, first served", views: Sequence[Callable[..., Picture]] = (
              batch_occupancy, memory_map), names: Names = None, **engine_args: Any) -> Knobs:
    """Four knobs and the pictures that depend on them.

    Args:
        jobs: what the engine has to do; None: 12 made-up requests. Their arrival times are replaced, see `rate`.
        block_size, num_blocks: of the pool.
        rate: arrivals per second, evenly spaced; 0: all at once.
        policy: one of the keys of `POLICIES`.
        views: functions that draw a trace, as `block_table`.
        names: what the requests are called: ``{"0": "Ada"}`` or a list in order of arrival; see `Trace.named`.
        engine_args: more arguments for `simulate`; four seats and 64 tokens a step if not given.

    Raises:
        ValueError: there is no such policy, or the rate is negative.
    """
    if rate < 0:
        raise ValueError(f"rate must be arrivals per second, or 0 for all at once; got {rate!r}.")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}.")
    return Knobs(jobs, {"block_size": block_size, "num_blocks": num_blocks, "rate": rate, "policy": policy}, views,
                 names, {"max_num_seqs": 4, "max_num_batched_tokens": 64, **engine_args})


class Knobs:
    """See `knobs`.

    Attributes:
        settings: what the knobs say: block_size, num_blocks, rate, policy.
        trace: of the last simulation that ran; None if none could.
        pictures: one for each view, drawn from it.
        problem: why there is no picture, else "".
    """

    def __init__(self, jobs: Sequence[Job] | None, settings: dict[str, Any], views: Sequence[Callable[..., Picture]],
                 names: Names, engine_args: dict[str, Any]) -> None:
        from tutorial_engine.simulation import workload

        self._jobs = list(workload(12, (12, 80), (6, 40)) if jobs is None else jobs)
        self._views, self._names, self._engine_args = views, names, engine_args
        self.settings = settings
        self.trace: Trace | None = None
        self.pictures: list[Picture] = []
        self.problem = ""
        self._widgets: dict[str, Any] = {}
        self.run()

    def run(self) -> None:
        """Simulate with the settings as they are, and draw. A pool that is too small is no error, but a `problem`."""
        from tutorial_engine.simulation import simulate

        gap = 1 / self.settings["rate"] if self.settings["rate"] else 0.0
        jobs = [dataclasses.replace(job, arrival=round(i * gap, 6), priority=job.prompt_tokens)
                for i, job in enumerate(self._jobs)]
        try:
            self.trace = simulate(jobs, block_size=self.settings["block_size"], num_blocks=self.settings["num_blocks"],
                                  **POLICIES[self.settings["policy"]], **self._engine_args)
            self.trace.names, self.problem = self._names, ""
        except ValueError as error:
            self.trace, self.problem = None, str(error)
        self.pictures = [view(self.trace, -1) for view in self._views] if self.trace else []

    @property
    def html(self) -> str:
        """The pictures, or the problem."""
        if self.problem:
            return f"<p>{html.escape(self.problem)}</p>"
        return "".join(f"<div>{picture.image()}</div>" for picture in self.pictures)

    def __repr__(self) -> str:
        head = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return "\n\n".join([f"knobs({head})", *([self.problem] if self.problem else map(repr, self.pictures))])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/html": self.html, "text/plain": repr(self)}
        if is_live():
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return bundle

    @property
    def widget(self) -> Any:
        """The knobs and the pictures as one ipywidgets box; always the same."""
        if not self._widgets:
            self._build()
        return self._widgets["box"]

    def _build(self) -> None:
        import ipywidgets

        given = self.settings
        style = {"style": {"description_width": "130px"}, "layout": ipywidgets.Layout(width="430px")}
        late = {"continuous_update": False, **style}  # one run when the knob is let go
        sizes = sorted({4, 8, 16, 32, 64, given["block_size"]})
        made = {
            "block_size": ipywidgets.SelectionSlider(options=sizes, value=given["block_size"],
                                                     description="block size", **late),
            "num_blocks": ipywidgets.IntSlider(value=given["num_blocks"], min=4, max=max(129, given["num_blocks"]),
                                               description="blocks in the pool", **late),
            "rate": ipywidgets.FloatSlider(value=given["rate"], min=0, max=max(100.0, given["rate"]), step=1,
                                           description="arrivals a second", **late),
            "policy": ipywidgets.Dropdown(options=list(POLICIES), value=given["policy"], description="policy", **style),
        }
        picture = ipywidgets.HTML(self.html)

        def turned(change: dict[str, Any]) -> None:
            self.settings = {name: widget.value for name, widget in made.items()}
            self.run()
            picture.value = self.html

        for widget in made.values():
            widget.observe(turned, "value")
        rows = [ipywidgets.HBox([made[left], made[right]]) for left, right in
                (("block_size", "num_blocks"), ("rate", "policy"))]
        self._widgets = {**made, "box": ipywidgets.VBox([*rows, picture])}
