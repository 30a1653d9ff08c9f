"""A real S3 server behind a proxy that injects faults: what a stage's writer, its commit, its readers and the lease do.

The stores here make one attempt a request (two by s3fs) and wait seconds, not minutes, so that faults get through to
the layer under test.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from infra.object_store import PatientStore, S3ObjectStore
from infra.object_store.s3 import Bounds
from rlhf_core import layout
from rlhf_core.buffer import StageWriter, commit_stage, find_stage, load_stage, read_rows, read_shard
from rlhf_core.errors import CorruptObject, FencedOut, RunLocked
from rlhf_core.lease import Holder, Lease, lease_state
from rlhf_core.manifests import StageManifest
from rlhf_core.records import commit_record
from tests.fixtures.fault_proxy import gets, puts

RUN = "run-1"
ME = Holder.current()
ELSEWHERE = Holder(host="another-host", pid=1, process_start=0.0, user="ann")
QUICK = Bounds(connect_seconds=2.0, read_seconds=2.0, attempts=1)
PATIENCE = 60.0
COMMIT = "/commits/generate.json"
SHARD = "/data/generate/"


@pytest.fixture
def prefix():
    return f"faults/{uuid.uuid4().hex}"


@pytest.fixture
def store(proxy, prefix):
    """Through the proxy, with the client's own retries."""
    with closing(S3ObjectStore("contracts", prefix, proxy.url)) as opened:
        yield opened


@pytest.fixture
def quick(proxy, prefix):
    """Through the proxy, with nearly no retries."""
    with closing(S3ObjectStore("contracts", prefix, proxy.url, QUICK)) as opened:
        yield opened


@pytest.fixture
def patient(quick):
    return PatientStore(quick, PATIENCE)


@pytest.fixture
def direct(s3_env, prefix):
    """The same objects on another way, without faults."""
    with closing(S3ObjectStore("contracts", prefix, s3_env.endpoint)) as opened:
        yield opened


@contextmanager
def closing(store):
    try:
        yield store
    finally:
        store.close()


@contextmanager
def outage(proxy, seconds):
    """The server is away from now on, and comes back in the middle of the block, after ``seconds``."""
    proxy.down()
    back = threading.Timer(seconds, proxy.up)
    back.start()
    try:
        yield
    finally:
        back.join()


def table(rows, first=0):
    ids = [f"s{row:06d}" for row in range(first, first + rows)]
    # Hardly compressible, so that a shard has a size.
    text = [uuid.uuid5(uuid.NAMESPACE_OID, name).hex * 4 for name in ids]
    return pa.table({"sample_id": ids, "text": text})


def manifest(attempt, shards):
    return StageManifest(
        run=RUN, iteration=0, stage="generate", attempt=attempt, policy_version=0, shards=tuple(shards)
    )


def write(store, attempt="a1", rows=3000, shards=3):
    writer, edges = StageWriter(store, RUN, 0, "generate", attempt), range(0, rows + 1, rows // shards)
    return [writer.write_shard(table(end - start, start), start) for start, end in pairwise(edges)]


def commit(store, attempt="a1", **options):
    return commit_stage(store, manifest(attempt, write(store, attempt, **options)))


def require_whole(store, committed, rows=3000):
    """The stage is committed as told, once, and reads as it was written."""
    assert load_stage(store, RUN, 0, "generate") == committed
    assert store.list(f"{layout.iteration_root(RUN, 0)}/commits") == [layout.stage_commit(RUN, 0, "generate")]
    assert read_rows(store, [committed]).equals(table(rows))


def test_short_burst_of_slow_down_is_the_clients_business(proxy, store, direct):
    for match in (puts(SHARD), puts(COMMIT), gets(SHARD)):
        proxy.add("status", match, times=2, code=503, s3_code="SlowDown")
    committed, mine = commit(store)
    assert mine
    require_whole(store, committed)
    require_whole(direct, committed)
    assert sum(request.fault == "status" for request in proxy.seen) == 6


def test_longer_burst_of_slow_down(proxy, quick, patient, direct, caplog):
    refused = proxy.add("status", times=8, code=503, s3_code="SlowDown")
    with pytest.raises(OSError, match=r"SlowDown") as caught:
        quick.put("a", b"1")
    assert not isinstance(caught.value, (PermissionError, FileNotFoundError))
    committed, mine = commit(patient)
    assert mine
    assert refused.hits == 8
    require_whole(direct, committed)
    assert caplog.text.count("answers again") == 1


def test_other_errors_of_an_overloaded_server(proxy, patient):
    for code, s3_code in ((500, "InternalError"), (502, "BadGateway"), (429, "TooManyRequests")):
        proxy.add("status", code=code, s3_code=s3_code)
    patient.put("a", b"1")
    assert patient.get("a") == b"1"
    assert [request.fault for request in proxy.seen] == ["status"] * 3 + [None] * 2


def test_connection_cut_in_the_middle_of_a_put(proxy, store, direct):
    visible = []

    def cut(method, target):
        if not puts(SHARD)(method, target):
            return False
        visible.append(direct.list(RUN))
        return True

    proxy.add("cut_request", cut, times=2, after=20_000)
    committed, mine = commit(store)
    assert mine
    assert visible == [[]] * len(visible)  # half a shard is no object
    require_whole(direct, committed)


def test_connection_cut_in_the_middle_of_every_put_until_patience_helps(proxy, patient, direct):
    cut = proxy.add("cut_request", puts(SHARD), times=7, after=20_000)
    committed, mine = commit(patient)
    assert mine
    assert cut.hits == 7
    require_whole(direct, committed)


def test_damaged_put_is_refused_by_the_server_and_sent_again(proxy, store, direct):
    flip = proxy.add("flip_request", puts(SHARD), times=1, at=5000)
    committed, mine = commit(store)
    assert (mine, flip.hits) == (True, 1)
    require_whole(direct, committed)


@pytest.mark.parametrize("times", [1, 2])
def test_lost_answer_of_the_commit_is_no_second_commit(proxy, quick, direct, times):
    lost = proxy.add("drop_response", puts(COMMIT), times=times)  # 2: the client gives up without an answer
    committed, mine = commit(quick)
    assert (mine, lost.hits) == (True, times)
    require_whole(direct, committed)


def test_lost_answer_of_the_commit_with_patience(proxy, patient, direct):
    lost = proxy.add("drop_response", puts(COMMIT), times=5)
    committed, mine = commit(patient)
    assert (mine, lost.hits) == (True, 5)
    require_whole(direct, committed)


def test_lost_answer_of_a_late_commit_adopts_the_first_one(proxy, patient, direct):
    first, mine = commit(direct, "a1")
    assert mine
    proxy.add("drop_response", puts(COMMIT), times=5)
    adopted, mine = commit(patient, "a2")
    assert (adopted, mine) == (first, False)
    require_whole(direct, first)


FAULTY_READS = {
    "short": {"kind": "short_response", "less": 100},
    "flipped": {"kind": "flip_response", "at": 3000},
    "cut": {"kind": "cut_response", "after": 3000},
    "stalled": {"kind": "stall_body", "after": 3000},
}


@pytest.mark.parametrize("fault", FAULTY_READS)
def test_damaged_reads_are_made_again(proxy, quick, direct, fault):
    committed, _ = commit(direct)
    options = dict(FAULTY_READS[fault])
    proxy.add(options.pop("kind"), gets(SHARD), times=2, **options)
    require_whole(quick, committed)
    assert proxy.count(gets(SHARD)) > len(committed.shards)


@pytest.mark.parametrize("fault", ["short", "flipped"])
def test_damage_that_only_the_digest_finds(proxy, quick, direct, fault):
    committed, _ = commit(direct)
    options = {**FAULTY_READS[fault], "hide_checksums": True}
    kind, first, second = options.pop("kind"), committed.shards[0], committed.shards[1]
    proxy.add(kind, gets(first.key), times=2, **options)  # right at the third try
    proxy.add("clean", gets(SHARD), times=None, hide_checksums=True)
    require_whole(quick, committed)
    assert proxy.count(gets(first.key)) == 3
    proxy.clear()
    proxy.add(kind, gets(second.key), times=None, **options)  # for ever
    with pytest.raises(CorruptObject, match=second.key):
        read_rows(PatientStore(quick, PATIENCE), [committed])
    assert read_shard(quick, first).num_rows == first.rows


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
def test_object_that_is_damaged_in_the_store(patient, direct, damage):
    committed, _ = commit(direct)
    shard, data = committed.shards[1], bytearray(direct.get(committed.shards[1].key))
    if damage == "missing":
        direct.delete([shard.key])
    else:
        data[100] ^= 1
        direct.put(shard.key, bytes(data if damage == "flip" else data[:-50]))
    with pytest.raises(CorruptObject, match=shard.key):
        read_rows(patient, [committed])


def test_object_that_never_matches_the_servers_checksum(proxy, patient, direct, caplog):
    committed, _ = commit(direct)
    shard = committed.shards[1]
    proxy.add("flip_response", gets(shard.key), times=None, at=3000)
    with pytest.raises((CorruptObject, OSError), match=shard.key):
        read_rows(patient, [committed])
    assert "trying again" not in caplog.text  # it is no outage


def test_damaged_commit_record(proxy, quick, direct):
    committed, _ = commit(direct)
    proxy.add("flip_response", gets(COMMIT), times=None, at=50, hide_checksums=True)
    with pytest.raises(CorruptObject, match="generate"):
        load_stage(quick, RUN, 0, "generate")
    proxy.clear()
    assert load_stage(quick, RUN, 0, "generate") == committed


def test_slow_server(proxy, quick, direct):
    proxy.add("delay", puts(COMMIT), times=1, seconds=0.5)
    proxy.add("throttle", times=None, bytes_per_second=400_000)
    committed, mine = commit(quick, rows=600)
    assert mine
    require_whole(quick, committed, rows=600)


def test_server_that_says_nothing_for_a_while(proxy, prefix, direct):
    mute = proxy.add("delay", times=2, seconds=30.0)  # longer than the client waits
    with closing(S3ObjectStore("contracts", prefix, proxy.url, replace(QUICK, read_seconds=1.0))) as store:
        PatientStore(store, PATIENCE).put("a", b"1")
    assert mute.hits == 2
    assert direct.get("a") == b"1"


def test_server_away_while_a_stage_is_written_and_committed(proxy, patient, direct, caplog):
    writer = StageWriter(patient, RUN, 0, "generate", "a1")
    shards = [writer.write_shard(table(1000), 0)]
    with outage(proxy, 1.0):
        shards.append(writer.write_shard(table(1000, 1000), 1000))
    shards.append(writer.write_shard(table(1000, 2000), 2000))
    with outage(proxy, 1.0):
        committed, mine = commit_stage(patient, manifest("a1", shards))
    assert mine
    with outage(proxy, 0.5):
        require_whole(patient, committed)
    require_whole(direct, committed)
    assert caplog.text.count("fails, trying again") == caplog.text.count("answers again") == 3


def test_files_outlast_an_outage(proxy, patient, direct, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 4096 * 34)  # 34 MiB: three parts
    part = proxy.add("cut_request", lambda method, target: "partNumber=2" in target, times=3, after=100_000)
    patient.put_file("checkpoint/file", str(source))
    assert part.hits == 3
    with outage(proxy, 1.0):
        patient.get_file("checkpoint/file", str(target))
    assert target.read_bytes() == source.read_bytes() == direct.get("checkpoint/file")


def test_patience_ends(proxy, quick):
    proxy.down()
    with pytest.raises(ConnectionError, match=r"'a': the endpoint does not answer .*\(tried \d+ times in \d+ s\)"):
        PatientStore(quick, 1.0).get("a")


def test_refusals_come_out_at_once(proxy, prefix, monkeypatch, caplog):
    with closing(S3ObjectStore("no-such-bucket", prefix, proxy.url)) as stranger:
        for call in (lambda s: s.get("a"), lambda s: s.list("")):
            with pytest.raises(OSError, match="bucket does not exist"):
                call(PatientStore(stranger, PATIENCE))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with closing(S3ObjectStore("contracts", prefix, proxy.url)) as stranger:
        for call in (lambda s: s.put("a", b"1"), lambda s: s.create("a", b"1"), lambda s: s.exists("a")):
            with pytest.raises(PermissionError, match="credentials"):
                call(PatientStore(stranger, PATIENCE))
    assert caplog.records == []


def test_lease_outlasts_an_outage(proxy, patient, quick, direct):
    ttl = 0.5
    with Lease.acquire(patient, RUN, ME, ttl, beats=quick) as lease:
        lease.check()
        with outage(proxy, 4 * ttl):
            lease.check()  # waits for the store, then finds that nobody took over
        back = time.time()
        while lease_state(direct, RUN).last_seen < back:  # the heartbeats go on
            pass
        assert lease_state(direct, RUN).claim == lease.claim
        lease.check()
    assert lease_state(direct, RUN).released


def test_lease_that_was_taken_over_while_only_its_holder_was_cut_off(proxy, patient, quick, direct):
    lease = Lease.acquire(patient, RUN, ME, 0.5, beats=quick)
    proxy.down()
    rival = None
    while rival is None:
        try:
            rival = Lease.acquire(direct, RUN, ELSEWHERE)
        except RunLocked:
            continue
    with rival:
        proxy.up()
        with pytest.raises(FencedOut, match=r"another-host pid 1 \(epoch 2\) took over from epoch 1"):
            lease.check()
        rival.check()
        # It may still commit where nobody else has: commits are decided by the store, not by the lease.
        assert find_stage(direct, RUN, 0, "generate") is None
    lease.release()


def test_release_does_not_wait_for_the_store(proxy, patient, quick, caplog):
    lease = Lease.acquire(patient, RUN, ME, 1.0, beats=quick)
    proxy.down()
    lease.release()
    assert "could not be released" in caplog.text
    assert "fails, trying again" not in caplog.text


def test_lost_answer_of_a_claim(proxy, patient, direct):
    lost = proxy.add("drop_response", puts("/lease/"), times=3)
    with Lease.acquire(patient, RUN, ME) as lease:
        assert lost.hits == 3
        lease.check()
        assert lease_state(direct, RUN).claim.token == lease.token
    claim = lease.claim.model_copy(update={"token": "other"})
    assert commit_record(direct, layout.lease(RUN, 1), claim) == (lease.claim, False)
