"""`rlhf train` of a tiny model to the end, and everything that a user finds afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

STAGES = ("generate", "score", "advantages", "update", "sync", "commit")
ITERATIONS = 7

VLLM_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 26)
chats = [[{"role": "user", "content": prompt}] for prompt in json.loads(sys.argv[2])]
outputs = llm.chat(chats, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
print("ANSWERS", json.dumps([o.outputs[0].text for o in outputs]))
"""


def greedy_samples(world, version):
    samples = world.record(f"runs/a/evaluations/v{version:010d}.json")["samples"]
    return [(s["prompt"], s["response"]) for s in samples if s["kind"] == "greedy"]


@pytest.fixture(scope="module")
def export(world, reference):
    return world.folder / ".rlhf" / "exports" / "a"


def test_the_table_and_the_ui_are_shown(world, reference, export):
    assert f"run a: watch it at {world.api_url.removesuffix('/api')}" in reference.stderr
    rows = {line[:15].strip(): line[15:].strip() for line in reference.stdout.splitlines()}
    assert rows["run"] == "a"
    assert rows["iterations"] == rows["policy version"] == str(ITERATIONS)
    assert all(float(word) >= 0 for word in rows["held-out reward"].replace(",", "").split()[::2])
    assert float(rows["sampled reward"]) > 0
    assert float(rows["tokens/s"]) > 0
    assert all(f"{stage} " in rows["seconds a stage"] for stage in STAGES[:-1])
    assert rows["exported to"] == str(export)


def test_show_as_json(world, reference, export):
    shown = world.json("show", "a")
    assert shown["run"] == "a"
    assert shown["state"] == "complete"
    assert shown["iterations_planned"] == shown["iterations_done"] == shown["policy_version"] == ITERATIONS
    assert 0 <= shown["reward_before"] <= 1
    assert 0 <= shown["reward_after"] <= 1
    assert shown["reward_before"] != shown["reward_after"]
    assert shown["export"] == str(export)
    assert str(export) in shown["next_step"]
    assert [i["iteration"] for i in shown["iterations"]] == list(range(ITERATIONS))
    for iteration in shown["iterations"]:
        assert iteration["stage_states"] == dict.fromkeys(STAGES, "committed")
        assert set(iteration["stage_seconds"]) == set(STAGES[:-1])
    for name in (
        "reward/mean", "reward/std", "reward/component_letters", "policy/entropy", "update/grad_norm", "store/bytes",
        "mismatch/log_ratio_abs", "generate/tokens_per_second", "generate/response_length", "memory/trainer_peak_gib",
        "generate/truncated_fraction", "sync/bytes", "sync/probe_gap", "seconds/update",
    ):  # fmt: skip
        assert all(isinstance(i["metrics"][name], float) for i in shown["iterations"]), name
    assert all(i["metrics"]["sync/probe_gap"] < 1e-4 for i in shown["iterations"])
    assert all(i["metrics"]["update/grad_norm"] > 0 for i in shown["iterations"])
    table = world.rlhf("show", "a").stdout
    assert "complete" in table
    assert "grad norm" in table


def test_runs_and_rollouts_as_json(world, reference):
    (row,) = [r for r in world.json("runs") if r["run"] == "a"]
    assert (row["state"], row["iterations_done"], row["iterations"]) == ("complete", ITERATIONS, ITERATIONS)
    assert row["reward_after"] == world.json("show", "a")["reward_after"]
    rollouts = world.json("rollouts", "a", "0")
    assert len(rollouts) == 8
    for rollout in rollouts:
        text = rollout["response"]
        assert rollout["reward"] == pytest.approx(sum(c in "abcdefghijklm" for c in text) / max(1, len(text)))
        assert rollout["components"] == {"letters": rollout["reward"]}
        assert rollout["answer"].isdigit()
        assert "What is" in rollout["prompt"]
    assert sum(r["advantage"] for r in rollouts[:4]) == pytest.approx(0, abs=1e-5)
    printed = world.rlhf("rollouts", "a", "0", "--limit", "2").stdout
    assert printed.count("000000-") == 2
    missing = world.rlhf("rollouts", "a", "99")
    assert missing.returncode == 3
    assert "99" in missing.stderr


def test_the_policy_learned_something_and_weights_changed_every_iteration(world, reference):
    digests = [world.weights("a", iteration) for iteration in range(ITERATIONS)]
    assert len(set(digests)) == ITERATIONS
    before, after = greedy_samples(world, 0), greedy_samples(world, ITERATIONS)
    assert len(before) == len(after) == 4
    assert {p for p, _ in before} == {p for p, _ in after}
    assert before != after


def test_plain_transformers_gives_the_same_greedy_answers(world, reference, export):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True).eval()
    assert model.dtype == torch.float32
    for prompt, response in greedy_samples(world, ITERATIONS):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(**chat, max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(tokens[0, chat["input_ids"].shape[1] :], skip_special_tokens=True) == response


def test_plain_vllm_gives_the_same_greedy_answers(world, reference, export):
    samples = greedy_samples(world, ITERATIONS)
    command = [sys.executable, "-c", VLLM_PROGRAM, str(export), json.dumps([prompt for prompt, _ in samples])]
    env = world.environment(VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    done = subprocess.run(command, cwd=world.folder, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (answers,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert json.loads(answers.removeprefix("ANSWERS ")) == [response for _, response in samples]


def test_tensorboard_has_every_metric(world, reference):
    (events,) = (world.folder / ".rlhf" / "tensorboard" / "a").glob("events*")
    content = events.read_bytes()
    assert content.count(b"reward/mean") == ITERATIONS
    assert b"update/grad_norm" in content


def test_prefect_shows_run_iterations_stages_and_artifacts(world, reference):
    run = world.flow_runs("a")[-1]
    assert run["state_type"] == "COMPLETED"
    assert run["parameters"]["config"]["run"] == "a"
    tasks = world.task_states(run["id"], expected=6 + ITERATIONS)
    iterations = [f"iteration-{k:06d}" for k in range(ITERATIONS)]
    assert tasks == dict.fromkeys(
        [
            "preflight",
            "cluster",
            "parity",
            "evaluate-v0",
            *iterations,
            f"evaluate-v{ITERATIONS}",
            f"export-v{ITERATIONS}",
        ],
        "Completed",
    )
    for iteration in (0, ITERATIONS - 1):
        (subflow,) = world.flow_runs(f"a-it{iteration:06d}")
        assert subflow["state_type"] == "COMPLETED"
        expected = {f"it{iteration:06d}-{stage}": "Completed" for stage in STAGES}
        assert world.task_states(subflow["id"], expected=6) == expected


def test_prefect_has_metrics_rollouts_progress_and_summary(world, reference, export):
    def artifact(key):
        return world.prefect(f"artifacts/{key}/latest")

    metrics = {row["metric"]: float(row["value"]) for row in json.loads(artifact("a-metrics")["data"])}
    recorded = world.record(f"runs/a/iterations/{ITERATIONS - 1:06d}/DONE.json")["metrics"]
    assert metrics == pytest.approx(recorded, rel=1e-5)
    assert artifact("a-rollouts")["data"].count("reward ") == 4
    summary = artifact("a-summary")["data"]
    assert str(export) in summary
    assert f"| iterations | {ITERATIONS} |" in summary
    run = world.flow_runs("a")[-1]
    rows = world.prefect("artifacts/filter", {"artifacts": {"type": {"any_": ["progress"]}}})
    assert [r["data"] for r in rows if r["flow_run_id"] == run["id"]] == [100.0]


def test_the_actors_end_with_the_run(world, reference):
    assert world.actor_processes() == []


def test_a_finished_run_started_again_does_nothing_and_says_so(world, reference):
    before = len(world.flow_runs("a-it000000"))
    started = time.monotonic()
    again = world.train("a", timeout=60)
    assert time.monotonic() - started < 60
    assert again.stdout.splitlines()[:5] == reference.stdout.splitlines()[:5]
    assert len(world.flow_runs("a-it000000")) == before
    run = world.flow_runs("a")[0]
    assert run["state_type"] == "COMPLETED"
    assert not any(name.startswith("iteration-") for name in world.task_states(run["id"], expected=1))
    assert world.actor_processes() == []


def test_fewer_iterations_than_are_finished_are_refused(world, reference):
    done = world.rlhf("train", str(world.preset), "--run", "a", "--set", "iterations=3")
    assert done.returncode == 2
    assert f"iterations = 3, but run 'a' has finished {ITERATIONS}" in done.stderr
