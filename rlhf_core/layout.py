"""Every object key of the system, as pure functions. Nobody else spells a key.

::

    runs/{branch}/                                      a run's name; after a rerun NAME~1, NAME~2, ... beside it
        run.json                                        the branch's record (configuration, lineage)
        revisions/{revision}.json                       put-if-absent, below the name: the highest one is the run's head
        bases/{version}/{number}.json                   put-if-absent: weights of a version that a replay could not reproduce
        base.json                                       the same at the version that the branch begins with, format 2 only
        environments/{id}.json                          put-if-absent: what the bits of updates depend on
        parity.json                                     put-if-absent: trainer and engines agree with the plain model
        children/{branch}.json                          put-if-absent: who shares the stages of this branch, and up to where
        lease/{epoch}.json, lease/{epoch}.beat.json     who drives the run; below the name
        prompts/{name}
        iterations/{iteration}/
            data/{stage}/{attempt}/{first_row}-{digest16}.arrow   immutable; counts only where a commit names it
            commits/{stage}.json                        put-if-absent: the truth about the stage
            DONE.json                                   put-if-absent: the truth about the iteration
            GUARD.json                                  put-if-absent: its update was rolled back, the batch is left out
            RETIRED.json                                put-if-absent: its rollouts were deleted on purpose
        checkpoints/{version}/{attempt}/{relpath}
        checkpoints/commits/{version}.json              put-if-absent
        evaluations/{name}.json
        export/{relpath}
        target.json                                     rewritten: how many iterations the run is to have
        reported/{sink}.json                            rewritten: the iterations that a tracker was told

Numbers are zero-padded, so keys sort as numbers do.
"""

from __future__ import annotations

import re

from rlhf_core.config.run import RUN_ID_PATTERN
from rlhf_core.errors import UserError

_RUN = re.compile(RUN_ID_PATTERN)
_REVISION = re.compile(r"[1-9][0-9]{0,8}")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.[A-Za-z0-9_-])*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKPOINT_COMMIT = re.compile(r"runs/[^/]+/checkpoints/commits/(\d{10,})\.json")
_LONGEST_NAME = 63
#: Characters of a digest in a shard's name.
DIGEST_CHARACTERS = 16


def check_run(run: str) -> str:
    """Return the run id. UserError if it cannot be a key, a folder and an actor namespace."""
    if not isinstance(run, str) or len(run) > _LONGEST_NAME or not _RUN.fullmatch(run):
        raise UserError(
            f"run id {run!r}: use letters, digits, '-', '_' and single dots inside, at most {_LONGEST_NAME}"
        )
    return run


def branch(run: str, revision: int) -> str:
    """Id of a branch: the run's name, and from its first rerun on the revision behind a ``~``, which no name contains."""
    return f"{check_run(run)}~{revision}" if revision else check_run(run)


def check_branch(branch_id: str) -> str:
    """Return the id of a branch. UserError if it is none."""
    if not isinstance(branch_id, str):
        return check_run(branch_id)
    name, mark, revision = branch_id.partition("~")
    check_run(name)
    if mark and not _REVISION.fullmatch(revision):
        raise UserError(f"branch {branch_id!r}: behind '~' stands the number of a revision, 1 or higher")
    return branch_id


def named_branch(text: str) -> str:
    """Id of the branch that a user names with a ``~``: ``NAME~0`` is what the run was before its first rerun."""
    name, _, revision = text.partition("~")
    return check_run(name) if revision == "0" else check_branch(text)


def run_name(branch_id: str) -> str:
    """The name of the run that a branch belongs to."""
    return check_branch(branch_id).partition("~")[0]


def check_name(name: str, what: str = "name") -> str:
    """Return a stage, attempt or evaluation name. ValueError if it is not one simple key segment."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: use letters, digits, '-', '_' and single dots inside, at most {_LONGEST_NAME}"
        )
    return name


def check_relpath(relpath: str) -> str:
    """Return a relative path with ``/``. ValueError if it is absolute, empty or leaves its folder."""
    parts = relpath.split("/")
    if not relpath or "\\" in relpath or any(not part or part == "." or ".." in part for part in parts):
        raise ValueError(f"relative path {relpath!r}: use names separated by '/', without '..', and no leading '/'")
    return relpath


def run_root(run: str) -> str:
    """Folder of a branch of a run."""
    return f"runs/{check_branch(run)}"


def first_base(run: str) -> str:
    """Where earlier versions of this system recorded the weights that a branch of another topology begins with."""
    return f"{run_root(run)}/base.json"


def base(run: str, version: int, number: int) -> str:
    """The record of the weights that a policy version has since its ``number``-th replay that was not exact."""
    return f"{bases(run)}/{_number(version, 10, 'policy version')}/{_number(number, 4, 'base')}.json"


def bases(run: str) -> str:
    """Folder of the records of weights that a replay could not reproduce."""
    return f"{run_root(run)}/bases"


def environment(run: str, name: str) -> str:
    """The record of what the bits of updates depend on."""
    return f"{run_root(run)}/environments/{check_name(name, 'environment')}.json"


def parity(run: str) -> str:
    """The record that trainer and engines compute the plain model's function, in which layouts."""
    return f"{run_root(run)}/parity.json"


def revision(run: str, number: int) -> str:
    """The record that makes revision 1, 2, ... the head of the run."""
    if number < 1:
        raise ValueError(f"revision {number}: the first one is 1")
    return f"runs/{check_run(run)}/revisions/{_number(number, 6, 'revision')}.json"


def children(run: str) -> str:
    """Folder of the records of those that share stages of this branch."""
    return f"{run_root(run)}/children"


def child(run: str, child_branch: str) -> str:
    """The record that ``child_branch`` shares stages of this branch."""
    return f"{children(run)}/{check_branch(child_branch)}.json"


def version_name(version: int) -> str:
    """Name of a policy version among evaluations and exports; sorts by number."""
    return f"v{_number(version, 10, 'policy version')}"


def run_target(run: str) -> str:
    """How many iterations the run is to have, where that was changed after its start."""
    return f"{run_root(run)}/target.json"


def run_record(run: str) -> str:
    """The run's own record: its configuration and lineage."""
    return f"{run_root(run)}/run.json"


def lease(run: str, epoch: int) -> str:
    """The claim of the driver of this epoch; epochs count from 1. One lease for all branches of a run."""
    return f"{run_root(run_name(run))}/lease/{_number(epoch, 6, 'epoch')}.json"


def heartbeat(run: str, epoch: int) -> str:
    """The heartbeat of the driver of this epoch. Rewritten."""
    return f"{run_root(run_name(run))}/lease/{_number(epoch, 6, 'epoch')}.beat.json"


def prompts(run: str, relpath: str) -> str:
    """An object about the run's prompts."""
    return f"{run_root(run)}/prompts/{check_relpath(relpath)}"


def iteration_root(run: str, iteration: int) -> str:
    """Folder of one iteration."""
    return f"{run_root(run)}/iterations/{_number(iteration, 6, 'iteration')}"


def stage_commit(run: str, iteration: int, stage: str) -> str:
    """The commit record (StageManifest) of one stage."""
    return f"{iteration_root(run, iteration)}/commits/{check_name(stage, 'stage')}.json"


def stage_data(run: str, iteration: int, stage: str) -> str:
    """Folder of the shards of all attempts at one stage."""
    return f"{iteration_root(run, iteration)}/data/{check_name(stage, 'stage')}"


def shard(run: str, iteration: int, stage: str, attempt: str, first_row: int, digest: str) -> str:
    """One Arrow file, named by its first row and the blake3 of its content (64 hex digits)."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest {digest!r} is not 64 hex digits")
    folder = f"{stage_data(run, iteration, stage)}/{check_name(attempt, 'attempt')}"
    return f"{folder}/{_number(first_row, 8, 'first_row')}-{digest[:DIGEST_CHARACTERS]}.arrow"


def iteration_done(run: str, iteration: int) -> str:
    """The record that ends an iteration."""
    return f"{iteration_root(run, iteration)}/DONE.json"


def guard(run: str, iteration: int) -> str:
    """The record that an update of the iteration was rolled back."""
    return f"{iteration_root(run, iteration)}/GUARD.json"


def iteration_retired(run: str, iteration: int) -> str:
    """The record that the iteration's rollouts and experience were deleted on purpose."""
    return f"{iteration_root(run, iteration)}/RETIRED.json"


def checkpoint_commits(run: str) -> str:
    """Folder of the commit records of all checkpoints."""
    return f"{run_root(run)}/checkpoints/commits"


def checkpoint_commit(run: str, version: int) -> str:
    """The commit record of the checkpoint of one policy version."""
    return f"{checkpoint_commits(run)}/{_number(version, 10, 'version')}.json"


def checkpoint_version(key: str) -> int | None:
    """The policy version of a checkpoint's commit record, None for any other key."""
    match = _CHECKPOINT_COMMIT.fullmatch(key)
    return int(match[1]) if match else None


def checkpoint_root(run: str, version: int) -> str:
    """Folder of the files of all attempts at one checkpoint."""
    return f"{run_root(run)}/checkpoints/{_number(version, 10, 'version')}"


def checkpoint_attempt(run: str, version: int, attempt: str) -> str:
    """Folder of the files of one attempt at a checkpoint."""
    return f"{checkpoint_root(run, version)}/{check_name(attempt, 'attempt')}"


def evaluation(run: str, name: str) -> str:
    """The record of one evaluation."""
    return f"{run_root(run)}/evaluations/{check_name(name, 'evaluation')}.json"


def reported(run: str, sink: str) -> str:
    """The cursor of somebody who is told finished iterations."""
    return f"{run_root(run)}/reported/{check_name(sink, 'sink')}.json"


def export(run: str, relpath: str) -> str:
    """One file of the exported model."""
    return f"{run_root(run)}/export/{check_relpath(relpath)}"


def _number(value: int, digits: int, what: str) -> str:
    # bool is an int, and a numpy integer or a float would format differently
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} {value!r}: a non-negative int is needed")
    return f"{value:0{digits}d}"
