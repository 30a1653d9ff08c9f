"""The trainer for real: DeepSpeed ZeRO-3 over gloo, one and two ranks, each rank in a process of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithms.batching import minibatches
from rlhf_core.engines.rows import TokenRows, gather_rows
from rlhf_core.engines.weights import WeightsDigest, unpack
from rlhf_core.errors import NumericsError
from rlhf_core.testing.tiny_model import make_tiny_model

#: AdamW with an epsilon far above the gradients: the step is proportional to the gradient, as with SGD. With the usual one
#: the first step is about the sign of the gradient, and rounding decides it where gradients are nearly 0.
SMOOTH = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9}
TOLERANCE = 1e-5


def relative_difference(one, other, base):
    """Largest difference of two sets of new weights, relative to the largest change of the weights."""
    assert one.keys() == other.keys() == base.keys()
    change = max(float((one[name] - base[name]).abs().max()) for name in base)
    assert change > 1e-4
    return max(float((one[name] - other[name]).abs().max()) for name in base) / change


def pick(experience, rows):
    """The experience of these rows only; groups keep their numbers."""
    offsets = experience.tokens.response_offsets

    def ragged(values, offsets):
        lengths = offsets.diff()[rows]
        return gather_rows(values, offsets, rows), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    tokens = TokenRows(
        *ragged(experience.tokens.prompt_values, experience.tokens.prompt_offsets),
        *ragged(experience.tokens.response_values, offsets),
    )
    columns = ("behaviour_logprobs", "old_logprobs", "advantages", "ref_logprobs")
    parts = {name: getattr(experience, name) for name in columns}
    parts = {name: None if column is None else gather_rows(column, offsets, rows) for name, column in parts.items()}
    return replace(experience, tokens=tokens, groups=experience.groups[rows], scored=experience.scored[rows], **parts)


def row_of_token(experience):
    lengths = experience.tokens.response_lengths
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def change_advantages(experience, change):
    """``change`` maps (row of each token, advantages) to new advantages."""
    return replace(experience, advantages=change(row_of_token(experience), experience.advantages.clone()))


def trained(ranks, model, experience, **changes):
    with ranks.engine(model, **changes) as engine:
        metrics = engine.update(experience)
        return engine.weights(), metrics


# What an update computes


def naive_update(model, experience, kl_coef, algorithm, optim):
    """One AdamW step on the loss of each row written out, without any of the engine's code. Returns loss and norm."""
    tokens, total, loss = experience.tokens, 0, 0.0
    columns = (experience.old_logprobs, experience.behaviour_logprobs, experience.advantages, experience.ref_logprobs)
    for row, scored in enumerate(experience.scored.tolist()):
        part = slice(*tokens.response_offsets[row : row + 2].tolist())
        prompt = tokens.prompt_values[slice(*tokens.prompt_offsets[row : row + 2].tolist())].long()
        response = tokens.response_values[part].long()
        if not scored or not len(response):
            continue
        total += len(response)
        table = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = table[torch.arange(len(response)), response]
        old, behaviour, advantages, ref = (None if column is None else column[part] for column in columns)
        ratios = torch.exp(logprobs - old)
        clipped = ratios.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        weights = torch.exp(old - behaviour).clamp(max=algorithm.importance_cap)
        loss = loss - (weights * torch.minimum(ratios * advantages, clipped * advantages)).sum()
        if kl_coef:
            distances = logprobs - ref
            loss = loss + kl_coef * (torch.exp(-distances) - 1 + distances).sum()
    loss = loss / total
    loss.backward()
    # In float64: the norm of six million numbers in float32 is off by several millionths.
    norm = torch.stack([parameter.grad.double().square().sum() for parameter in model.parameters()]).sum().sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, optim.max_grad_norm / norm.item()))
    torch.optim.AdamW(
        model.parameters(),
        lr=optim.learning_rate,
        betas=optim.betas,
        eps=optim.epsilon,
        weight_decay=optim.weight_decay,
    ).step()
    return loss.item(), norm.item()


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_an_update_is_the_formula(two_ranks, tiny_model, make_experience, reference, base_state, kl_coef):
    experience = make_experience()
    if kl_coef:
        experience = replace(experience, ref_logprobs=experience.old_logprobs + 0.1)
    changes = SMOOTH | {"learning_rate": 5.0, "max_grad_norm": 0.5, "weight_decay": 0.01, "kl_coef": kl_coef}
    with two_ranks.engine(tiny_model, **changes) as engine:
        metrics, weights, settings = engine.update(experience), engine.weights(), engine.settings
    plain = reference()
    loss, norm = naive_update(plain, experience, kl_coef, settings.algorithm, settings.optim)
    assert norm > 0.5, "the clipping is part of the test"
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["update/grad_norm"] == pytest.approx(norm, rel=1e-5)
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert relative_difference(weights, expected, base_state) < TOLERANCE


# How the work is cut


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory, tokenizer_folder):
    """Matrices above ZeRO's persistence threshold, so that the layers themselves are partitioned and gathered."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), tokenizer_folder, hidden=384, heads=6, layers=2, seed=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_microbatch": 40},
        {"tokens_per_microbatch": 40, "share_prompts": True, "aggregation": "seq-mean-token-mean"},
        {"aggregation": "seq-mean-token-sum-norm", "importance_cap": 0.0, "gradient_checkpointing": True},
    ],
    ids=["rows", "shared prompts", "checkpointed"],
)
def test_two_ranks_do_what_one_does(one_rank, two_ranks, tiny_model, make_experience, base_state, changes):
    experience = make_experience()
    one, metrics_one = trained(one_rank, tiny_model, experience, **SMOOTH, **changes)
    two, metrics_two = trained(two_ranks, tiny_model, experience, **SMOOTH, **changes)
    assert relative_difference(one, two, base_state) < TOLERANCE
    assert metrics_one == pytest.approx(metrics_two, rel=1e-4)


def test_two_ranks_do_what_one_does_with_partitioned_layers(one_rank, two_ranks, wide_model, make_experience):
    experience = make_experience(groups=2)
    with one_rank.engine(wide_model) as engine:
        base = engine.weights()
    one, _ = trained(one_rank, wide_model, experience, **SMOOTH, tokens_per_microbatch=40)
    two, _ = trained(two_ranks, wide_model, experience, **SMOOTH, tokens_per_microbatch=40)
    assert relative_difference(one, two, base) < TOLERANCE


def test_two_ranks_do_nearly_what_one_does_with_plain_adamw(
    one_rank, two_ranks, tiny_model, make_experience, base_state
):
    # The first step of AdamW is the sign of the gradient: where rounding decides it, weights may differ by two steps.
    rate = 1e-3
    one, _ = trained(one_rank, tiny_model, make_experience(), learning_rate=rate)
    two, _ = trained(two_ranks, tiny_model, make_experience(), learning_rate=rate)
    differences = torch.cat([(one[name] - two[name]).abs().flatten() for name in base_state])
    assert differences.max() <= 2.001 * rate
    assert differences.mean() < 1e-5 * rate


def test_neither_the_size_of_micro_batches_nor_shared_prompts_change_anything(
    one_rank, tiny_model, make_experience, base_state
):
    experience = make_experience(seed=1)
    expected, metrics = trained(one_rank, tiny_model, experience, **SMOOTH)
    for budget, share_prompts in ((1, False), (60, False), (60, True), (4096, True)):
        changes = SMOOTH | {"tokens_per_microbatch": budget, "share_prompts": share_prompts}
        weights, other = trained(one_rank, tiny_model, experience, **changes)
        assert relative_difference(expected, weights, base_state) < TOLERANCE
        assert other == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("rows", [[0], [0, 4, 8], [4, 5, 6, 7, 8]], ids=["one row", "three rows", "five rows"])
def test_ranks_with_less_or_nothing_to_do_keep_up(one_rank, two_ranks, tiny_model, make_experience, base_state, rows):
    # With one token of budget every row is a micro-batch: two ranks get 1 and 0, 2 and 1, 3 and 2.
    experience = pick(make_experience(), torch.tensor(rows))
    one, _ = trained(one_rank, tiny_model, experience, **SMOOTH, tokens_per_microbatch=1)
    two, metrics = trained(two_ranks, tiny_model, experience, **SMOOTH, tokens_per_microbatch=1)
    assert relative_difference(one, two, base_state) < TOLERANCE
    assert metrics["policy/tokens"] == float(experience.tokens.response_lengths.sum())


def test_every_group_is_used_once_in_two_steps(one_rank, tiny_model, make_experience):
    experience = make_experience(groups=4)
    order = minibatches(4, 2, (0, 3, 0))
    assert sorted(order[0] + order[1]) == [0, 1, 2, 3]
    with one_rank.engine(tiny_model, updates_per_iteration=2) as engine:
        metrics, digest = engine.update(experience, iteration=3), engine.digest()
    learns = experience.active & (experience.tokens.response_lengths > 0)
    assert metrics["update/steps"] == 2
    assert metrics["policy/tokens"] == float(experience.tokens.response_lengths[learns].sum())
    with one_rank.engine(tiny_model) as engine:
        for groups in order:
            engine.update(pick(experience, torch.isin(experience.groups, torch.tensor(groups)).nonzero().squeeze(1)))
        assert engine.digest() == digest


def test_epochs_pass_over_the_experience_again(one_rank, tiny_model, make_experience):
    experience = make_experience()
    with one_rank.engine(tiny_model, epochs=2) as engine:
        metrics, digest = engine.update(experience), engine.digest()
        assert engine.all("get", "steps") == [2]
    assert metrics["update/steps"] == 2
    with one_rank.engine(tiny_model) as engine:
        engine.update(experience)
        engine.update(experience)
        assert engine.digest() == digest


# Which rows count


def test_rows_without_a_reward_count_in_no_denominator(one_rank, tiny_model, make_experience):
    experience = make_experience()
    scored = torch.ones(len(experience.groups), dtype=torch.bool)
    scored[[1, 3, 6, 12]] = False
    lost = ~scored[row_of_token(experience)]
    experience = replace(
        experience, scored=scored,
        advantages=experience.advantages.masked_fill(lost, torch.nan),
        behaviour_logprobs=experience.behaviour_logprobs.masked_fill(lost, torch.nan),
    )  # fmt: skip
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        changes = SMOOTH | {"aggregation": aggregation}
        without, _ = trained(one_rank, tiny_model, pick(experience, scored.nonzero().squeeze(1)), **changes)
        weights, _ = trained(one_rank, tiny_model, experience, **changes)
        assert all(torch.equal(weights[name], without[name]) for name in weights)


def test_rows_with_advantage_zero_count_in_the_denominator(one_rank, tiny_model, make_experience):
    experience = make_experience()
    experience = replace(experience, scored=torch.ones_like(experience.scored))
    experience = change_advantages(experience, lambda row, advantages: advantages.masked_fill(row >= 8, 0.0))
    half = pick(experience, torch.arange(8))
    lengths = experience.tokens.response_lengths
    _, metrics = trained(one_rank, tiny_model, experience, **SMOOTH)
    _, metrics_half = trained(one_rank, tiny_model, half, **SMOOTH)
    share = float(lengths[:8].sum() / lengths.sum())
    assert metrics["update/grad_norm"] == pytest.approx(share * metrics_half["update/grad_norm"], rel=1e-5)
    assert metrics["policy/tokens"] == metrics_half["policy/tokens"], "they are not computed"


def test_a_step_without_anything_to_learn_changes_nothing(two_ranks, tiny_model, make_experience):
    experience = make_experience()
    silent = change_advantages(experience, lambda row, advantages: torch.zeros_like(advantages))
    unscored = replace(experience, scored=torch.zeros_like(experience.scored))
    with two_ranks.engine(tiny_model, warmup_steps=3) as engine:
        before = engine.digest()
        for nothing in (silent, unscored):
            assert engine.update(nothing) == {"update/skipped_steps": 1.0}
            assert engine.digest() == before
            assert engine.all("get", "steps") == [0, 0]
        metrics = engine.update(experience)
        assert metrics["update/learning_rate"] == pytest.approx(engine.settings.optim.learning_rate / 3)
        assert engine.digest() != before


def test_the_learning_rate_warms_up(one_rank, tiny_model, make_experience, base_state):
    experience = make_experience()
    with one_rank.engine(tiny_model, learning_rate=0.1, epsilon=1.0, warmup_steps=2) as engine:
        rates = [engine.update(experience)["update/learning_rate"]]
        warm = engine.weights()
        rates += [engine.update(experience)["update/learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([0.05, 0.1, 0.1])
    full, _ = trained(one_rank, tiny_model, experience, learning_rate=0.1, epsilon=1.0)
    half = {name: base_state[name] + (full[name] - base_state[name]) / 2 for name in full}
    assert relative_difference(warm, half, base_state) < 1e-4


# Numbers that are not finite


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_an_error_on_every_rank(two_ranks, tiny_model, make_experience, broken):
    # One row is one rank's: the other must neither wait for it for ever nor go on.
    experience = make_experience()
    experience = change_advantages(experience, lambda row, advantages: advantages.masked_fill(row == 5, broken))
    with two_ranks.engine(tiny_model) as engine:
        before = engine.digest()
        errors = [error for _, error in engine.outcomes("update", experience, 4, 0)]
        assert [type(error) for error in errors] == [NumericsError, NumericsError]
        assert [f"rank {rank}: " in str(error) for rank, error in enumerate(errors)] == [True, True]
        assert sum("rows [" in str(error) for error in errors) == 1, "the rank that had the row names its micro-batch"
        assert engine.digest() == before
        assert engine.all("get", "steps") == [0, 0]


def test_old_logprobs_that_are_not_numbers_are_an_error(one_rank, tiny_model, make_experience):
    experience = make_experience()
    row = row_of_token(experience)
    experience = replace(experience, old_logprobs=experience.old_logprobs.masked_fill(row == 4, torch.nan))
    with one_rank.engine(tiny_model) as engine:
        ((_, error),) = engine.outcomes("update", experience, 4, 0)
        assert isinstance(error, NumericsError)


# Weights in and out


def test_every_rank_and_every_receiver_computes_one_digest(two_ranks, tiny_model, make_experience, base_state):
    with two_ranks.engine(tiny_model) as engine:
        expected = WeightsDigest()
        for name, tensor in base_state.items():
            expected.add(name, tensor)
        assert engine.digest() == expected.hexdigest(), "version 0 is what the folder holds"
        engine.update(make_experience())
        digest = engine.digest()
        assert digest != expected.hexdigest()
        for max_bytes in (1, 300_000, 1 << 30):
            for received in engine.all("buckets", max_bytes):
                arrived = WeightsDigest()
                for spec, flat in received:
                    for name, tensor in unpack(spec, flat):
                        arrived.add(name, tensor)
                assert arrived.hexdigest() == digest
            assert engine.all("digest", max_bytes) == [digest, digest]


def test_the_state_dict_is_the_checkpoint_of_the_model(two_ranks, tiny_model, base_state):
    with two_ranks.engine(tiny_model) as engine:
        state, nothing = engine.all("state_dict")
    assert nothing is None
    assert state.keys() == base_state.keys()
    assert "lm_head.weight" not in state, "the embeddings are tied"
    assert all(torch.equal(state[name], base_state[name]) for name in state)
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}


def continued(engine, experiences, start):
    """Digests after each of the updates start, start + 1, ..."""
    digests = []
    for iteration in range(start, len(experiences)):
        engine.update(experiences[iteration], iteration)
        digests.append(engine.digest())
    return digests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_is_bit_identical(two_ranks, fresh_ranks, tiny_model, make_experience, tmp_path, dtype):
    experiences = [make_experience(seed) for seed in range(3)]
    changes = {"dtype": dtype, "warmup_steps": 4, "updates_per_iteration": 2, "learning_rate": 1e-3}
    with two_ranks.engine(tiny_model, **changes) as engine:
        engine.update(experiences[0], 0)
        engine.all("save", str(tmp_path), "v1")
        written = sum(path.stat().st_size for path in tmp_path.rglob("*.pt"))
        assert written <= sum(engine.all("checkpoint_bytes")) <= 1.5 * written
        first, expected = engine.digest(), continued(engine, experiences, 1)
        assert len({first, *expected}) == 3
        engine.all("load", str(tmp_path), "v1")
        assert engine.digest() == first
        assert engine.all("get", "steps") == [2, 2]
        assert continued(engine, experiences, 1) == expected
    assert not (tmp_path / "latest").exists(), "it would be a second truth beside the manifests"
    with fresh_ranks.engine(tiny_model, **changes) as engine:
        engine.all("load", str(tmp_path), "v1")
        assert engine.digest() == first
        assert continued(engine, experiences, 1) == expected


@pytest.fixture(scope="module")
def fresh_ranks(start_ranks):
    """Two ranks in processes that have never trained anything else than the test at hand."""
    ranks = start_ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("before", "after"), [("two_ranks", "one_rank"), ("one_rank", "two_ranks")])
def test_a_checkpoint_of_other_ranks_is_the_same_state(request, tiny_model, make_experience, tmp_path, before, after):
    experiences = [make_experience(seed) for seed in range(3)]
    changes = {"warmup_steps": 4, "learning_rate": 1e-3}
    with request.getfixturevalue(before).engine(tiny_model, **changes) as engine:
        engine.update(experiences[0], 0)
        engine.update(experiences[1], 1)
        engine.all("save", str(tmp_path / "old"), "v2")
        saved = engine.digest()
        engine.update(experiences[2], 2)
        expected = engine.all("state_dict")[0]
    ranks = request.getfixturevalue(after)
    with ranks.engine(tiny_model, **changes) as engine:
        folders = [(str(tmp_path / "old"), "v2", str(tmp_path / f"new{rank}")) for rank in range(ranks.world)]
        engine.each("load_resharded", folders)
        assert engine.digest() == saved
        assert set(engine.all("get", "steps")) == {2}
        engine.update(experiences[2], 2)  # with other moments Adam's step would be another one, by up to 2e-3
        found = engine.all("state_dict")[0]
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-5)


def test_a_checkpoint_that_is_not_there_is_an_error(one_rank, tiny_model, tmp_path):
    with one_rank.engine(tiny_model) as engine, pytest.raises(FileNotFoundError, match="no checkpoint 'v7' below"):
        engine.all("load", str(tmp_path), "v7")


# Forward passes


def test_logprobs_are_those_of_transformers(two_ranks, tiny_model, make_experience, reference, sequence_logprobs):
    experience, temperature = make_experience(), 0.7
    tokens = experience.tokens
    with two_ranks.engine(tiny_model) as engine:
        answers = engine.logprobs(tokens, temperature)
    plain = reference()
    assert sorted(answers) == list(range(len(experience.groups)))
    for row, (logprobs, entropies) in answers.items():
        prompt = tokens.prompt_values[tokens.prompt_offsets[row] : tokens.prompt_offsets[row + 1]].tolist()
        response = tokens.response_values[tokens.response_offsets[row] : tokens.response_offsets[row + 1]].tolist()
        expected = sequence_logprobs(plain, prompt + response, temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        assert entropies.shape == logprobs.shape
        assert bool((entropies > 0).all())


def test_the_reference_is_the_starting_policy_and_stays(two_ranks, tiny_model, make_experience):
    experience = make_experience()
    tokens = experience.tokens

    def column(answers):
        return torch.cat([answers[row][0] for row in range(len(experience.groups))])

    with two_ranks.engine(tiny_model, kl_coef=0.1, learning_rate=1e-2) as engine:
        start, frozen = (column(engine.logprobs(tokens, reference=flag)) for flag in (False, True))
        assert torch.equal(start, frozen)
        metrics = engine.update(replace(experience, ref_logprobs=frozen))
        assert metrics["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
        moved, kept = (column(engine.logprobs(tokens, reference=flag)) for flag in (False, True))
    assert torch.equal(kept, frozen)
    assert (moved - start).abs().mean() > 0.01


def test_there_is_no_reference_without_a_kl_term(one_rank, tiny_model, make_experience):
    with one_rank.engine(tiny_model) as engine, pytest.raises(RuntimeError, match="no reference model was loaded"):
        engine.logprobs(make_experience().tokens, reference=True)
