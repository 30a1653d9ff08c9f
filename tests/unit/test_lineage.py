"""Branches: which one a stage belongs to, where a run stands, and that counting is exact and cheap."""

from __future__ import annotations

import math
import random

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.errors import CorruptObject, NotCommitted
from rlhf_core.lineage import (
    Lineage,
    children,
    current_revision,
    head_of,
    load_lineage,
    require_reached,
    start_branch,
    start_revision,
)
from rlhf_core.manifests import STAGES, ParentRef
from rlhf_core.searching import count_without_gaps
from tasks.progress import load_progress, newest_checkpoint, planned_iterations
from tests.fixtures.stored_run import StoredRun, record_of, revisions

POSITIONS = [(iteration, stage) for iteration in range(5) for stage in STAGES]


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


def rerun(store, run, iteration, stage, request=""):
    """A new head of the run, without its first stage. Returns a writer for it."""
    lineage = load_lineage(store, run)
    parent = ParentRef(run=lineage.head, iteration=iteration, stage=stage)
    start_revision(store, lineage, parent, "test", request)
    branch = object.__new__(StoredRun)
    branch.store, branch.run = store, head_of(store, run)
    return branch


def laid_over(*begins):
    """Branch of every position, where each of (branch, iteration, stage) takes over everything from there on."""
    owner = {}
    for branch, iteration, stage in begins:
        for position in POSITIONS:
            if (position[0], STAGES.index(position[1])) >= (iteration, STAGES.index(stage)):
                owner[position] = branch
    return owner


def owners(lineage):
    return {position: lineage.branch_of(*position) for position in POSITIONS}


def test_reruns_of_reruns_and_a_fork_of_a_rerun(store):
    run = StoredRun(store)
    for k in range(4):
        run.finish(k)
    begins = [("r", 0, "generate")]
    assert owners(load_lineage(store, "r")) == laid_over(*begins)
    # The second rerun begins after the first, the third before both.
    for revision, (iteration, stage) in enumerate([(1, "score"), (2, "advantages"), (0, "update")], start=1):
        rerun(store, "r", iteration, stage)
        begins.append((f"r~{revision}", iteration, stage))
        lineage = load_lineage(store, "r")
        assert lineage.head == f"r~{revision}"
        assert owners(lineage) == laid_over(*begins)
    StoredRun(store, "f", parent=("r~2", 3, "sync"))
    assert owners(load_lineage(store, "f")) == laid_over(*begins[:3], ("f", 3, "sync"))
    StoredRun(store, "g", parent=("r~2", 0, "commit"))
    assert owners(load_lineage(store, "g")) == laid_over(*begins[:3], ("g", 0, "commit"))
    # Older revisions stay what they were.
    assert owners(load_lineage(store, "r~1")) == laid_over(*begins[:2])
    assert owners(load_lineage(store, "r~2")) == laid_over(*begins[:3])
    assert owners(load_lineage(store, "r~0")) == laid_over(*begins[:1])
    assert head_of(store, "r") == "r~3"
    assert [(r.revision, r.parent.run) for r in revisions(store, "r")] == [(1, "r"), (2, "r~1"), (3, "r~2")]


@pytest.mark.parametrize("seed", range(20))
def test_a_branch_takes_over_everything_from_where_it_begins(seed):
    dice = random.Random(seed)
    begins = [("b0", 0, "generate"), *((f"b{n}", *dice.choice(POSITIONS)) for n in range(1, dice.randrange(2, 8)))]
    records = [
        record_of(branch, ParentRef(run=f"b{n - 1}", iteration=iteration, stage=stage) if n else None)
        for n, (branch, iteration, stage) in enumerate(begins)
    ]
    lineage = Lineage(tuple(reversed(records)))
    expected = laid_over(*begins)
    assert owners(lineage) == expected
    assert lineage.head == begins[-1][0]
    assert lineage.first_own() == begins[-1][1]
    assert lineage.branch_of_version(0) == "b0"
    for version in range(1, 5):
        assert lineage.branch_of_version(version) == expected[version - 1, "update"]
    for position in POSITIONS:
        assert lineage.owner(*position).run == expected[position]


@pytest.mark.parametrize("stage", STAGES)
def test_progress_begins_where_the_branch_does(store, stage):
    run = StoredRun(store)
    for k in range(4):
        run.finish(k)
    branch = rerun(store, "r", 2, stage)
    lineage = load_lineage(store, "r")
    progress = load_progress(store, lineage)
    shares_update = STAGES.index(stage) > STAGES.index("update")
    assert (progress.run, progress.next_iteration, progress.policy_version) == ("r~1", 2, 3 if shares_update else 2)
    branch.finish(2)
    branch.finish(3)
    progress = load_progress(store, lineage)
    assert (progress.next_iteration, progress.policy_version) == (4, 4)
    branch.commit(4, "update", shards=())
    assert load_progress(store, lineage).policy_version == 5
    assert load_progress(store, load_lineage(store, "r~1")) == load_progress(store, lineage)


def test_progress_looks_a_logarithmic_number_of_times(tmp_path):
    class Counting(LocalObjectStore):
        looks = 0

        def exists(self, key):
            self.looks += 1
            iteration = int(key.split("/")[3])
            return iteration < 10_000

    store = Counting(tmp_path)
    lineage = Lineage((record_of("r"),))
    assert load_progress(store, lineage).next_iteration == 10_000
    assert store.looks < 40


def test_stages_are_found_where_they_lie(store):
    run = StoredRun(store)
    for k in range(2):
        run.finish(k)
    branch = rerun(store, "r", 1, "score")
    lineage = load_lineage(store, "r")
    assert lineage.load(store, 1, "generate").run == "r"
    assert lineage.find(store, 1, "score") is None  # the parent's is not the branch's
    with pytest.raises(NotCommitted, match=r"r~1/iterations/000001/commits/score\.json"):
        lineage.load(store, 1, "score")
    mine = branch.commit(1, "score", attempt="b")
    assert lineage.load(store, 1, "score") == mine
    assert load_lineage(store, "r~1").records == lineage.records
    with pytest.raises(NotCommitted):
        load_lineage(store, "r~2")


def test_reached(store):
    run = StoredRun(store)
    run.finish(0)
    run.commit(1, "generate")
    lineage = load_lineage(store, "r")
    for iteration, stage in [(0, s) for s in STAGES if s != "commit"] + [(1, "generate"), (1, "score")]:
        require_reached(store, lineage, iteration, stage)
    for iteration, stage, missing in (
        (1, "advantages", "iterations/000001/commits/score.json"),
        (1, "sync", "iterations/000001/commits/score.json"),
        (2, "generate", "iterations/000001/DONE.json"),
        (2, "score", "iterations/000001/DONE.json"),
        (9, "generate", "iterations/000008/DONE.json"),
    ):
        with pytest.raises(
            NotCommitted, match=f"'r' has not reached stage '{stage}' of iteration {iteration}"
        ) as error:
            require_reached(store, lineage, iteration, stage)
        assert missing in str(error.value)


def test_what_the_parent_reached_later_is_not_reached_by_the_branch(store):
    run = StoredRun(store)
    for k in range(3):
        run.finish(k)
    branch = rerun(store, "r", 1, "advantages")
    lineage = load_lineage(store, "r")
    require_reached(store, lineage, 1, "advantages")
    with pytest.raises(NotCommitted, match="runs/r~1/iterations/000001/commits/advantages"):
        require_reached(store, lineage, 1, "update")
    with pytest.raises(NotCommitted, match="runs/r~1/iterations/000001/DONE"):
        require_reached(store, lineage, 2, "generate")
    branch.finish(1)
    require_reached(store, lineage, 2, "generate")


def test_a_request_makes_one_revision(store):
    StoredRun(store).finish(0)
    first = rerun(store, "r", 0, "score", request="one")
    before = store.list("")
    assert rerun(store, "r", 0, "score", request="one").run == first.run == "r~1"
    assert store.list("") == before
    assert rerun(store, "r", 0, "score", request="two").run == "r~2"
    assert rerun(store, "r", 0, "score").run == "r~3"
    assert rerun(store, "r", 0, "score").run == "r~4"  # without a request every call is another one
    assert current_revision(store, "r") == 4
    assert [record.request for record in revisions(store, "r")] == ["one", "two", "", ""]


def test_a_revision_keeps_the_configuration_but_for_what_changes(store):
    StoredRun(store).finish(0)
    lineage = load_lineage(store, "r")
    parent = ParentRef(run="r", iteration=0, stage="score")
    start_revision(store, lineage, parent, "test", changes={"iterations": 77})
    record = load_lineage(store, "r").record
    assert record.config == {**lineage.record.config, "iterations": 77}
    assert (record.prompts, record.parent) == (lineage.record.prompts, parent)
    assert planned_iterations(store, load_lineage(store, "r")) == 77


def test_the_parents_know_a_child_before_it_exists(tmp_path):
    class Log(LocalObjectStore):
        def __init__(self, root):
            super().__init__(root)
            self.written = []

        def put(self, key, data):
            self.written.append(key)
            super().put(key, data)

        def create(self, key, data):
            self.written.append(key)
            return super().create(key, data)

    store = Log(tmp_path)
    StoredRun(store).finish(0)
    store.written.clear()
    rerun(store, "r", 0, "score")
    assert store.written == [layout.child("r", "r~1"), layout.run_record("r~1"), layout.revision("r", 1)]
    store.written.clear()
    StoredRun(store, "f", parent=("r~1", 0, "score"))
    assert store.written[-1] == layout.run_record("f")
    assert set(store.written[:-1]) == {layout.child("r", "f"), layout.child("r~1", "f")}
    assert {record.child for record in children(store, "r")} == {"r~1", "f"}
    assert [record.parent.run for record in children(store, "r~1")] == ["r~1"]
    assert children(store, "f") == []


@pytest.mark.parametrize("dies_at", ["children", "run.json", "revisions"])
def test_a_rerun_that_is_cut_off_changes_nothing_and_can_be_asked_for_again(tmp_path, dies_at):
    class Dying(LocalObjectStore):
        armed = False

        def put(self, key, data):
            if self.armed and dies_at in key:
                raise OSError("killed")
            super().put(key, data)

        def create(self, key, data):
            if self.armed and dies_at in key:
                raise OSError("killed")
            return super().create(key, data)

    store = Dying(tmp_path)
    StoredRun(store).finish(0)
    store.armed = True
    with pytest.raises(OSError, match="killed"):
        rerun(store, "r", 0, "score")
    store.armed = False
    assert head_of(store, "r") == "r"
    assert rerun(store, "r", 0, "update").run == "r~1"
    assert load_lineage(store, "r").record.parent == ParentRef(run="r", iteration=0, stage="update")
    assert [record.parent.stage for record in children(store, "r")] == ["update"]


def test_a_branch_has_a_parent_that_is_there(store):
    with pytest.raises(ValueError, match="a branch has a parent"):
        start_branch(store, record_of("f"))
    with pytest.raises(NotCommitted, match="no run 'nobody'"):
        start_branch(store, record_of("f", ParentRef(run="nobody", iteration=0, stage="score")))
    assert store.list("") == []


def test_a_run_that_is_half_there(store):
    StoredRun(store).finish(0)
    rerun(store, "r", 0, "score")
    StoredRun(store, "f", parent=("r~1", 0, "update"))
    store.delete([layout.run_record("r")])
    with pytest.raises(NotCommitted, match=r"there is no run 'r' in .*, but 'r~1' shares its stages"):
        load_lineage(store, "f")
    store.delete([layout.run_record("r~1")])
    with pytest.raises(NotCommitted, match=r"there is no run 'r~1' in .*, but 'f' shares its stages"):
        load_lineage(store, "f")
    with pytest.raises(NotCommitted, match=r"there is no run 'nobody' in .*rlhf runs"):
        load_lineage(store, "nobody")


def test_parents_that_go_round_in_a_circle(store):
    for run, parent in (("a", "b"), ("b", "a")):
        StoredRun(store, f"x{run}")
        record = record_of(run, ParentRef(run=parent, iteration=0, stage="score"))
        store.put(layout.run_record(run), sealed(record))
    with pytest.raises(CorruptObject, match="does not end"):
        load_lineage(store, "a")


def sealed(record):
    from rlhf_core.records import canonical, seal

    return canonical(seal(record).model_dump(mode="json"))


def test_checkpoints_are_shared_up_to_where_the_branch_begins(store):
    run = StoredRun(store)
    for k in range(4):
        run.finish(k)
        run.checkpoint(k + 1)
    branch = rerun(store, "r", 2, "update")

    def newest(version):
        found = newest_checkpoint(store, load_lineage(store, "r"), version)
        return None if found is None else (found.run, found.policy_version)

    assert newest(4) == ("r", 2)  # version 3 and 4 were made by updates that the head does not share
    branch.checkpoint(3)
    assert newest(4) == newest(3) == ("r~1", 3)
    assert newest(2) == ("r", 2)
    assert newest(1) == ("r", 1)
    assert newest(0) is None
    rerun(store, "r", 2, "sync")  # shares that update
    assert newest(9) == ("r~1", 3)


@pytest.mark.parametrize("seed", range(5))
def test_counting_is_exact_and_logarithmic(seed):
    dice = random.Random(seed)
    for _ in range(200):
        there = dice.choice([dice.randrange(0, 20), dice.randrange(0, 100_000), 2 ** dice.randrange(0, 20)])
        there = max(0, there + dice.randrange(-1, 2))
        known = dice.randrange(0, there + 1)
        looks = []

        def exists(number, there=there, looks=looks):
            assert number >= 0
            looks.append(number)
            return number < there

        assert count_without_gaps(exists, known) == there
        assert len(looks) == len(set(looks))  # nothing is looked up twice
        assert min(looks) >= known  # what is known is not looked up
        assert len(looks) <= 2 * (math.log2(there - known + 1) + 1)


def test_counting_nothing():
    assert count_without_gaps(lambda _: False) == 0
    assert count_without_gaps(lambda _: False, known=7) == 7
