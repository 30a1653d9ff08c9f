"""What the engine tests share: a tiny model, one vLLM engine, trainer ranks as processes, and experience to learn from."""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from rlhf_core.testing.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
CALL_SECONDS = 90.0
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tokenizer_folder):
    """Folder of the tiny model, float32: policy version 0 of every engine here."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tokenizer_folder)


@pytest.fixture(scope="session")
def reference(tiny_model):
    """Function: state dict (None for the tiny model's own) -> transformers model with these weights, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    def build(state=None):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        if state is not None:
            missing = model.load_state_dict(state, strict=False)
            assert set(missing.missing_keys) <= {"lm_head.weight"}
            assert missing.unexpected_keys == []
        return model

    return build


@pytest.fixture(scope="session")
def sequence_logprobs():
    """Function: (transformers model, token ids, temperature) -> logprobs of tokens 1.. given what precedes them."""
    import torch

    @torch.no_grad()
    def score(model, sequence, temperature=1.0):
        table = (model(torch.tensor([sequence])).logits[0, :-1] / temperature).log_softmax(-1)
        return table.gather(1, torch.tensor(sequence[1:])[:, None]).squeeze(1)

    return score


# Ray


@pytest.fixture(scope="module")
def ray_of_two_cores():
    """A Ray cluster of a module's own, with two cores; this process is connected to it. Yields ``ray``."""
    import ray

    ray.init(
        address="local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False,
        object_store_memory=100_000_000,
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def failing_actors():
    """The module of actors that fail. Workers cannot import it, so it travels by value."""
    from ray import cloudpickle

    path = REPOSITORY / "tests" / "fixtures" / "failing_actors.py"
    spec = importlib.util.spec_from_file_location("failing_actors", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[spec.name]


# vLLM


@pytest.fixture(scope="session")
def session_vllm(tiny_model):
    """vLLM with the tiny model, in this process, one for all tests. Use ``vllm``, which restores its weights."""
    from rlhf_core.engines.vllm_engine import EngineSettings, VllmEngine

    engine = VllmEngine(EngineSettings(str(tiny_model), "float32", max_model_len=128, max_num_seqs=8))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sync():
    """Function: (engine, state dict, version, max_bytes) -> digest. A whole weight update from one reused buffer."""
    import torch

    from rlhf_core.engines.weights import WeightsDigest, pack, plan_buckets, unpack

    def send(engine, state, version, max_bytes=1 << 24):
        specs = plan_buckets([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()], max_bytes)
        buffer = torch.zeros(max(spec.bytes for spec in specs), dtype=torch.uint8)
        digest = WeightsDigest()
        engine.begin_update()
        for spec in specs:
            flat = pack(spec, state, buffer)
            for name, tensor in unpack(spec, flat):
                digest.add(name, tensor)
            engine.load_bucket(spec, flat.numpy())
        return engine.finish_update(version, digest.hexdigest())

    return send


@pytest.fixture(scope="session")
def base_state(tiny_model):
    """The tiny model's weights by Hugging Face name."""
    from safetensors.torch import load_file

    return load_file(tiny_model / "model.safetensors")


@pytest.fixture
def vllm(session_vllm, sync, base_state):
    """The session's engine with the tiny model's weights as version 0 and nothing running."""
    if session_vllm.version != 0:
        sync(session_vllm, base_state, 0)
    assert not session_vllm.llm.llm_engine.has_unfinished_requests()
    return session_vllm


# Trainer ranks


@dataclass
class Rank:
    process: subprocess.Popen
    connection: object
    log: Path


class Ranks:
    """A world of trainer ranks. Every call goes to all of them at once and has a deadline."""

    def __init__(self, world: int, folder: Path, timeout_seconds: float) -> None:
        self.world, self.folder, self.timeout_seconds = world, folder, timeout_seconds
        self._engines = 0
        self._start()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.master = f"127.0.0.1:{free.getsockname()[1]}"
        self.broken = False
        self._ranks = [self._spawn(self.folder / f"rank{rank}.log") for rank in range(self.world)]

    @staticmethod
    def _spawn(log: Path) -> Rank:
        here, there = Pipe()
        program = str(Path(__file__).with_name("rank_process.py"))
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, program, str(there.fileno())],
                pass_fds=[there.fileno()], env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        there.close()
        return Rank(process, here, log)

    def outcomes(self, operation: str, name: str, arguments: list[tuple]) -> list[tuple]:
        """(result, error) of every rank; TimeoutError with the logs, and the end of all ranks, past the deadline."""
        for rank, mine in zip(self._ranks, arguments, strict=True):
            rank.connection.send_bytes(pickle.dumps((operation, name, mine)))
        replies = []
        for number, rank in enumerate(self._ranks):
            try:
                if not rank.connection.poll(CALL_SECONDS):
                    raise TimeoutError(f"rank {number} hangs in {operation}")
                replies.append(pickle.loads(rank.connection.recv_bytes()))
            except (EOFError, TimeoutError) as error:
                self.kill()
                logs = "\n".join(f"--- {r.log.name}\n{r.log.read_text()[-2000:]}" for r in self._ranks)
                raise TimeoutError(f"rank {number} died or hangs in {operation}: {error!r}\n{logs}") from None
        return replies

    @contextmanager
    def engine(self, model: Path, **changes) -> Iterator[RankEngine]:
        """An engine on all ranks, in new processes after an error.

        ``changes`` are fields of OptimConfig, AlgorithmConfig or TrainerSettings.
        """
        from rlhf_core.config.learning import AlgorithmConfig, OptimConfig
        from rlhf_core.engines.zero3_engine import TrainerSettings

        def part(section):
            return section(**{key: changes.pop(key) for key in list(changes) if key in section.model_fields})

        if self.broken:
            self.kill()
            self._start()
        optim = part(OptimConfig)  # first: `epsilon` of the tests is the optimizer's
        algorithm = part(AlgorithmConfig)
        settings = TrainerSettings(
            model=str(model), dtype="float32", device="cpu", rank=0, world_size=self.world, master=self.master,
            optim=optim, algorithm=algorithm, reference=algorithm.kl_coef > 0,
            temperature=1.0, max_new_tokens=MAX_NEW_TOKENS,
            seed=0, timeout_seconds=self.timeout_seconds,
        )  # fmt: skip
        settings = replace(settings, **changes)
        self._engines += 1
        engine = RankEngine(self, f"engine{self._engines}", settings)
        try:
            engine.each("start", [(replace(settings, rank=rank),) for rank in range(self.world)])
            yield engine
            engine.all("drop")
        except BaseException:
            self.broken = True  # ranks may be stuck in a collective: the next engine gets new processes
            raise

    def kill(self) -> None:
        """End the processes at once."""
        self.broken = True
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
            rank.process.wait()

    def close(self) -> None:
        """End the processes by closing their pipes."""
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            try:
                rank.process.wait(30)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
                raise


class RankEngine:
    """One Zero3Engine a rank."""

    def __init__(self, ranks: Ranks, name: str, settings) -> None:
        self.ranks, self.name, self.settings = ranks, name, settings

    def outcomes(self, operation: str, *arguments) -> list[tuple]:
        """(result, error) of every rank."""
        return self.ranks.outcomes(operation, self.name, [arguments] * self.ranks.world)

    def each(self, operation: str, arguments: list[tuple]) -> list:
        """Results of all ranks, each with its own arguments; raises the first error."""
        results = []
        for result, error in self.ranks.outcomes(operation, self.name, arguments):
            if error is not None:
                raise error
            results.append(result)
        return results

    def all(self, operation: str, *arguments) -> list:
        """Results of all ranks for the same arguments."""
        return self.each(operation, [arguments] * self.ranks.world)

    def update(self, experience, iteration: int = 0) -> dict:
        """Metrics of one iteration, merged over the ranks."""
        from rlhf_core.metrics import merge_metrics, values

        groups = int(experience.groups.max()) + 1
        return values(merge_metrics(self.all("update", experience, groups, iteration)))

    def digest(self) -> str:
        """Digest of the weights, the same on every rank."""
        digests = set(self.all("digest"))
        assert len(digests) == 1
        return digests.pop()

    def weights(self) -> dict:
        """State dict of rank 0."""
        return self.all("state_dict")[0]

    def logprobs(self, tokens, temperature: float = 1.0, reference: bool = False) -> dict:
        """Row -> (logprobs, entropies), the rows spread over the ranks by the engine's own plan."""
        import torch

        from rlhf_core.engines.rows import units_of

        rows = list(range(len(tokens.response_lengths)))
        units = units_of(rows, torch.zeros(len(rows), dtype=torch.int64), share_prompts=False)
        plan = self.all("plan", tokens, units)[0]
        results = self.each("logprobs", [(tokens, mine, temperature, reference) for mine in plan])
        return {row: pair for result in results for row, pair in result.items()}


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory):
    """Function: (world size, timeout of collectives) -> Ranks in fresh processes, ended with the session at the latest."""
    started: list[Ranks] = []

    def start(world: int, timeout_seconds: float = 60.0) -> Ranks:
        started.append(Ranks(world, tmp_path_factory.mktemp("ranks"), timeout_seconds))
        return started[-1]

    yield start
    for ranks in started:
        if any(rank.process.poll() is None for rank in ranks._ranks):
            ranks.close()


@pytest.fixture(scope="session")
def one_rank(start_ranks):
    """A world of one rank, shared by tests; each makes engines of its own in it."""
    return start_ranks(1)


@pytest.fixture(scope="session")
def two_ranks(start_ranks):
    """A world of two ranks, shared by tests; each makes engines of its own in it."""
    return start_ranks(2)


@pytest.fixture(scope="session")
def ragged():
    """Function: lists of numbers -> (flat values, offsets [N + 1])."""
    import torch

    def flatten(lists, dtype=torch.int32):
        values = torch.tensor([value for one in lists for value in one], dtype=dtype)
        lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
        return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    return flatten


@pytest.fixture(scope="session")
def make_experience(ragged):
    """Function: (seed, groups, samples) -> Experience of random rows, near the tiny model's logprobs.

    The lengths differ, one response is empty, one advantage is 0 and one row has no reward.
    """
    import torch

    from rlhf_core.engines.experience import Experience
    from rlhf_core.engines.rows import TokenRows

    def make(seed=0, groups=4, samples=4):
        rng = random.Random(seed)
        prompts, responses = [], []
        for _ in range(groups):
            prompt = [rng.randrange(3, 40_000) for _ in range(rng.randint(2, 9))]
            for _ in range(samples):
                prompts.append(prompt)
                responses.append([rng.randrange(3, 40_000) for _ in range(rng.randint(1, MAX_NEW_TOKENS))])
        responses[1] = []
        rows = TokenRows(*ragged(prompts), *ragged(responses))
        lengths = rows.response_lengths
        advantages = torch.tensor([rng.uniform(-2, 2) for _ in prompts])
        advantages[2] = 0.0
        scored = torch.ones(len(prompts), dtype=torch.bool)
        scored[-1] = False
        # A random model is nearly uniform over its 49,152 tokens: logprobs are about -10.8.
        old = torch.tensor([-10.8 + rng.gauss(0, 0.15) for _ in range(int(lengths.sum()))])
        behaviour = old + torch.tensor([rng.gauss(0, 0.3) for _ in range(len(old))])
        group_N = torch.arange(groups).repeat_interleave(samples)
        return Experience(rows, group_N, behaviour, old, advantages.repeat_interleave(lengths), scored)

    return make
