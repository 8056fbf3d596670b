"""The knobs: each turn simulates anew; without anybody to turn them, one set of pictures."""

import pytest

from tutorial_engine.simulation import Job, simulate
from tutorial_engine.viz import batch_occupancy, block_table, knobs
from tutorial_engine.viz.knobs import POLICIES, WIDGET


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTORIAL_LIVE", "1")


def test_a_replay_shows_pictures_and_no_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTORIAL_LIVE", "0")
    bundle = knobs()._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"} and bundle["text/html"].count("<img ") == 2
    assert bundle == knobs()._repr_mimebundle_()
    assert bundle["text/plain"].startswith("knobs(block_size=16, num_blocks=33, rate=20.0, policy='first come, first")
    assert len(bundle["text/html"]) < 100_000


def test_each_knob_changes_the_run(live: None) -> None:
    board = knobs([Job(30, 12)] * 6, max_num_seqs=3, max_num_batched_tokens=32)
    box = board.widget
    assert board._repr_mimebundle_()[WIDGET] == {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    picture = box.children[-1]
    before = [picture.value]
    for name, value in (("policy", "static batches"), ("num_blocks", 9), ("block_size", 8), ("rate", 0.0)):
        board._widgets[name].value = value
        assert picture.value == board.html and picture.value not in before, name
        assert board.settings[name] == value
        before.append(picture.value)
    assert board.trace.records == simulate([Job(30, 12, priority=30)] * 6, num_blocks=9, block_size=8, static=True,
                                           max_num_seqs=3, max_num_batched_tokens=32).records
    assert board.widget is box


def test_a_pool_that_is_too_small_says_so(live: None) -> None:
    board = knobs([Job(100, 28)], num_blocks=33)
    picture = board.widget.children[-1]
    board._widgets["num_blocks"].value = 5
    assert "needs 8 blocks of 16, and the pool has 4" in picture.value and board.trace is None
    assert "needs 8 blocks" in repr(board)
    board._widgets["num_blocks"].value = 9
    assert "<img " in picture.value and not board.problem


def test_priority_lets_short_prompts_go_first() -> None:
    board = knobs([Job(60, 4), Job(60, 4), Job(5, 4)], rate=0, policy="priority: short prompts first", max_num_seqs=1)
    assert [i for r in board.trace for i in r.finished] == ["2", "0", "1"]


def test_other_views_and_policies() -> None:
    board = knobs(views=[block_table])
    assert board.pictures[0].text == block_table(board.trace, -1).text
    assert board.pictures[0].text != batch_occupancy(board.trace, -1).text
    with pytest.raises(ValueError, match="policy must be one of 'first come, first served'"):
        knobs(policy="random")
    with pytest.raises(ValueError, match="rate must be arrivals per second"):
        knobs(rate=-1)
    for policy in POLICIES:
        assert knobs(policy=policy).trace is not None
