"""The comparison before the first iteration, with the trainer's own code and engines that answer as they are told."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

import tasks.parity
from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.config import RunConfig, parse_config
from rlhf_core.engines.head import LogprobHead
from rlhf_core.engines.plain_model import plain_logprobs
from rlhf_core.engines.policy_model import load_policy
from rlhf_core.engines.probes import layout_logprobs, probe_logprobs
from rlhf_core.engines.rows import TokenRows
from rlhf_core.engines.zero3_engine import Zero3Engine
from rlhf_core.errors import ModelError, WorkerDied, WorkerError
from rlhf_core.manifests import ClusterRef, ParityRecord, PromptsManifest, RunRecord
from rlhf_core.models import ModelFacts
from rlhf_core.progress import Progress
from rlhf_core.prompts.table import write_prompts
from rlhf_core.records import commit_record, find_record
from rlhf_core.testing.families import VOCABULARY, make_family
from tasks.context import StageContext, lineage_of
from tasks.layouts import find_parity, learn_settings, probe_bound

CONFIG = {
    "run": "r",
    "model": {"source": "tiny", "dtype": "float32"},
    "optim": {"share_prompts": True, "tokens_per_microbatch": 128},
    "sync": {},
}


class Group:
    """Calls go to a function a method, as to every actor of a group."""

    def __init__(self, names, **methods):
        self.names, self.methods = names, methods

    def call(self, method, *arguments, seconds):
        return [self.methods[method](*arguments) for _ in self.names]

    def call_status(self, seconds):
        return [{"version": 0} for _ in self.names]


def rank(policy, learn):
    """A single rank without DeepSpeed: there is nothing to gather."""
    engine = Zero3Engine.__new__(Zero3Engine)
    engine.policy = engine.engine = policy
    engine.progress = Progress()
    engine.device, engine.settings = torch.device("cpu"), SimpleNamespace(optim=learn.optim, world_size=1, rank=0)
    return engine


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Makes a run of a family; ``fault`` is added to what the engine answers after the push."""

    def make(family, fault=0.0, push_error=None, **changes):
        folder = str(make_family(family, tmp_path / family))
        config = parse_config(CONFIG | changes | {"storage": {"url": str(tmp_path / "store")}})
        store = LocalObjectStore(tmp_path / "store")
        write_run(store, config)
        lineage_of.cache_clear()
        pushed = []

        def push(context, version, digest):
            if push_error is not None:
                raise push_error
            pushed.append((version, digest))
            return {}

        def scores(version, sequences):
            assert version == 0
            heads, tails = [s[:1] for s in sequences], [s[1:] for s in sequences]
            rows = plain_logprobs(folder, config.model.dtype, torch.device("cpu"), heads, tails).own
            return [row + np.float32(fault if pushed else 0.0) for row in rows]

        def plain(rows):
            return plain_logprobs(folder, config.model.dtype, torch.device("cpu"), rows.prompts, rows.responses)

        policy = load_policy(folder, config.model.dtype, gradient_checkpointing=False)
        trainers = Group(
            ["r-trainer-0"],
            plain_logprobs=plain,
            layout_logprobs=lambda version, rows, learn: layout_logprobs(rank(policy, learn), rows),
            weights_digest=lambda version: "d",
        )
        facts = ModelFacts("TinyForCausalLM", 256, VOCABULARY, (2,), window=8 if "window" in family else None)
        monkeypatch.setattr(StageContext, "trainers", property(lambda self: trainers))
        monkeypatch.setattr(
            StageContext, "engines", property(lambda self: Group(["r-engine-0"], sequence_logprobs=scores))
        )
        monkeypatch.setattr(tasks.parity, "push_weights", push)
        monkeypatch.setattr(tasks.parity, "model_folder", lambda config: folder)
        monkeypatch.setattr(tasks.parity, "check_model_folder", lambda folder: facts)
        monkeypatch.setattr(tasks.parity, "get_run_logger", lambda: logging.getLogger("parity"))
        cluster = ClusterRef(
            namespace="n",
            branch="r",
            epoch=1,
            device="cpu",
            trainers=("r-trainer-0",),
            engines=("r-engine-0",),
            rewards=(),
        )
        context = StageContext(config, cluster, 0, attempt="a")
        return SimpleNamespace(config=config, cluster=cluster, store=store, context=context, pushed=pushed)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(before)


def write_run(store, config: RunConfig):
    prompts = [[3 + (7 * i + 11 * row) % (VOCABULARY - 3) for i in range(5 + 4 * row)] for row in range(5)]
    columns = {
        "prompt_id": [str(row) for row in range(5)],
        "prompt_text": [""] * 5,
        "prompt_ids": pa.array(prompts, type=pa.list_(pa.int32())),
        "answer": [None] * 5,
        "metadata": [None] * 5,
    }
    shard = write_prompts(store, "r", "train", pa.table(columns))
    record = RunRecord(
        run="r",
        created="2026-01-01T00:00:00+00:00",
        config=config.model_dump(mode="json"),
        prompts=PromptsManifest(train=shard),
    )
    commit_record(store, layout.run_record("r"), record)


def run(world):
    return tasks.parity.parity.fn(world.config, world.cluster)


@pytest.mark.parametrize("family", ["llama", "phi3-window", "gemma2-softcaps", "qwen3-moe"])
def test_what_agrees_is_recorded_once(world, family, caplog):
    made = world(family)
    with caplog.at_level("INFO", "parity"):
        record = run(made)
    assert record.share_prompts
    assert record.plain
    assert "agree with the plain model" in caplog.text
    assert set(record.gaps) >= {"trainer, padded rows", "trainer, shared prompts", "r-engine-0"}
    assert all(mean < 1e-5 for mean, _ in record.gaps.values())
    assert made.pushed == [(0, "d")]
    assert find_record(made.store, layout.parity("r"), ParityRecord) == record
    assert run(made) == record
    assert len(made.pushed) == 1
    assert learn_settings(made.context, made.config) == made.config.learn
    assert probe_bound(made.context) == record.bound[0]


def test_layers_that_no_mask_keeps_apart_fall_back_to_padded_rows(world, caplog):
    made = world("qwen3-next")
    record = run(made)
    assert not record.share_prompts
    assert "linear_attention" in record.reason
    assert "optim.share_prompts is not used" in caplog.text
    learn = learn_settings(made.context, made.config)
    assert not learn.optim.share_prompts
    assert made.config.learn.optim.share_prompts, "the configuration stays what the user wrote"


def test_a_model_that_takes_no_mask_falls_back_with_its_own_words(world, monkeypatch):
    made = world("llama")

    def masks(self, mask, positions):
        raise TypeError("no mask, please")

    monkeypatch.setattr("rlhf_core.engines.attention.LayerKinds.masks", masks)
    record = run(made)
    assert (record.share_prompts, record.reason) == (False, "TypeError: no mask, please")


def test_a_layout_without_a_number_is_left_out(world, monkeypatch):
    made = world("llama")
    plain_head = LogprobHead.forward

    def broken(self, hidden, targets, temperature):
        logprobs, entropies = plain_head(self, hidden, targets, temperature)
        return (logprobs * torch.nan if made.sharing else logprobs), entropies

    def masks(self, mask, positions):
        made.sharing = True
        return mask

    made.sharing = False
    monkeypatch.setattr(LogprobHead, "forward", broken)
    monkeypatch.setattr("rlhf_core.engines.attention.LayerKinds.masks", masks)
    record = run(made)
    assert not record.share_prompts
    assert "nan nats" in record.reason
    assert "trainer, shared prompts" not in record.gaps


def test_a_layout_that_does_not_agree_is_found_by_its_figures(world, monkeypatch):
    made = world("mistral-window")
    monkeypatch.setattr("rlhf_core.engines.attention.LayerKinds._mask", lambda self, name, mask, positions: mask)
    monkeypatch.setattr(
        tasks.parity,
        "check_model_folder",
        lambda folder: ModelFacts("M", 256, VOCABULARY, (2,), window=8),
    )
    record = run(made)
    assert not record.share_prompts
    assert "trainer, shared prompts" in record.reason
    assert record.gaps["trainer, shared prompts"][0] > 100 * record.bound[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_differs_after_the_push_is_refused_with_the_figures(world, dtype):
    made = world("llama", fault=0.1, model={"source": "tiny", "dtype": dtype})
    with pytest.raises(ModelError, match=r"TinyForCausalLM \(tiny\) is not computed") as caught:
        run(made)
    wrong, agreeing = str(caught.value).split("(agrees)", 1)
    assert "r-engine-0 after a push of the same weights: " in wrong
    assert "trainer, padded rows" in agreeing
    assert find_parity(made.context) is None


def test_weights_that_do_not_get_into_the_engine_are_the_models_fault_but_a_death_is_not(world):
    with pytest.raises(ModelError, match=r"do not get from the trainer into the engine.*no parameter"):
        run(world("llama", push_error=WorkerError("load_bucket: no parameter x")))
    with pytest.raises(WorkerDied):
        run(world("llama", push_error=WorkerDied("gone")))


def test_older_runs_keep_their_layout_and_tolerance(world):
    made = world("llama")
    assert find_parity(made.context) is None
    assert learn_settings(made.context, made.config) == made.config.learn
    assert probe_bound(made.context) == made.config.probe_tolerance


def test_the_probe_runs_in_the_layout_of_an_update(world, tmp_path):
    made = world("mistral-window")
    policy = load_policy(str(tmp_path / "mistral-window"), "float32", gradient_checkpointing=False)
    seen = []
    policy.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    values, offsets = torch.arange(3, 33, dtype=torch.int32), torch.tensor([0, 10, 20, 30])
    tokens = TokenRows(values, offsets, values, offsets)
    found = probe_logprobs(rank(policy, made.config.learn), tokens, torch.tensor([0, 0, 1]))
    assert sorted(found) == [0, 1, 2]
    assert any(batch.mask_B1TT is not None for batch in seen)
