"""The inference engine: vLLM in the caller's process. This module and ``vllm_worker`` are the only ones that know vLLM.

In-process on purpose (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): behind vLLM's own process boundary the host spends more time on
shipping logprobs than the device on producing tokens (docs/gpu-results.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.engines.imports import import_for_good
from rlhf_core.errors import ConfigError, FencedOut, IntegrityError, StaleEngine
from rlhf_core.models import end_tokens
from rlhf_core.progress import Progress

if TYPE_CHECKING:
    from rlhf_core.config.learning import GenerateConfig
    from rlhf_core.engines.weights import BucketSpec

#: vLLM's names for the memory that sleep gives back.
SLEEP_TAGS = ("weights", "kv_cache")

#: How a response may end: at an end token, a stop token or a stop text, or at ``max_new_tokens``. Anything else is a fault
#: of the engine.
FINISH_REASONS = frozenset({"stop", "length"})

#: Sequences of a GPU engine in flight: vLLM keeps a [sequences, vocabulary] table for its sampler.
MAX_SEQUENCES_GPU = 1024

_EXTENSION = "rlhf_core.engines.vllm_worker.PolicyReceiver"


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine needs to start."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int = 0
    device: str = "cpu"
    tensor_parallel: int = 1
    memory_fraction: float = 0.4
    kv_cache_gib: float = 1.0
    sleep: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy. The rest is as in ``GenerateConfig``."""

    samples: int
    max_new_tokens: int
    temperature: float
    logprobs: bool = True
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: GenerateConfig, samples: int, greedy: bool = False, logprobs: bool = True) -> Sampling:
        """So many samples a prompt as the configuration says; ``greedy``: the most probable tokens instead."""
        return cls(
            samples=samples,
            max_new_tokens=config.max_new_tokens,
            temperature=0.0 if greedy else config.temperature,
            logprobs=logprobs,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            min_new_tokens=config.min_new_tokens,
            stop=tuple(config.stop),
            stop_token_ids=tuple(config.stop_token_ids),
        )


@dataclass(frozen=True)
class FinishedGroup:
    """All samples of one prompt. ``index`` is the prompt's position in the request; lists run over the samples."""

    index: int
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    seconds: float


def to_vllm_args(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for these settings. Pure; the user's ``options`` win."""
    args: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel,
        "logprobs_mode": "processed_logprobs",  # after temperature: the distribution that was sampled from
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
    }
    if settings.device == "cpu":
        # Compiling costs a minute and gains nothing at this size.
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30)}
    else:
        args |= {
            "gpu_memory_utilization": settings.memory_fraction,
            "enable_sleep_mode": settings.sleep,
            "max_num_seqs": min(settings.max_num_seqs, MAX_SEQUENCES_GPU),
        }
    if settings.tensor_parallel > 1:
        args |= {"distributed_executor_backend": "ray"}
    return args | settings.options


def sampling_params(sampling: Sampling, seed: int | None) -> Any:
    """vLLM's parameters of one sample. ``seed``: its stream, None for any."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=sampling.min_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # Texts are looked for in what the tokens say, special ones too; the response keeps all of its tokens.
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=0 if sampling.logprobs else None,
        seed=seed,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def check_options(options: Mapping[str, Any]) -> None:
    """ConfigError for one that vLLM does not have, before it loads anything."""
    from vllm import EngineArgs

    known = [argument.name for argument in fields(EngineArgs)]
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"generate.engine.{name} = {value!r}: vLLM has no such engine argument{hint}")


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment that vLLM reads when it starts."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if settings.device == "cpu":
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer shares the cores
    return environment


class VllmEngine:
    """One engine holding one policy version; anything asked of another version is refused."""

    def __init__(self, settings: EngineSettings, progress: Progress | None = None) -> None:
        os.environ.update(engine_environment(settings))  # vLLM has no other way to be told
        import_for_good(("vllm", "vllm.v1.engine.llm_engine", f"vllm.v1.worker.{settings.device}_worker"))
        from vllm import LLM

        check_options(settings.options)
        self.settings, self.progress = settings, progress or Progress()
        self.llm = LLM(**to_vllm_args(settings))
        self.llm.collective_rpc("rlhf_draw_by_position")
        #: vLLM looks for end tokens in generation_config.json and the tokenizer only, and not in config.json.
        self.end_ids = end_tokens(settings.model)
        self.version: int | None = 0  # what the model folder holds; None while an update is under way or has failed
        self.digest: str | None = None  # of the weights that the last update brought; None: those of the model folder
        self._sleeping: set[str] = set()
        self._requests = 0
        self._interrupted = False

    def interrupt(self) -> None:
        """End the call of ``generate`` that runs now, from another thread, after the step under way."""
        self._interrupted = True

    def require(self, version: int) -> None:
        """StaleEngine unless the engine serves exactly ``version`` and is awake."""
        if self.version != version:
            raise StaleEngine(f"the engine serves policy version {self.version}, not {version}: sync it first")
        if self._sleeping:
            raise StaleEngine("the engine sleeps: wake it before it generates")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        seeds: Sequence[Sequence[int]] | None = None,
        apart: bool = False,
    ) -> Iterator[FinishedGroup]:
        """Sample every prompt; groups come out as they finish, not in order.

        ``prompts`` are token ids. Logprobs are those of the distribution that each token was sampled from.

        ``seeds`` has one stream for each sample of each prompt, 0 .. 2^63 - 1 (``rlhf_core.seeds``): the response is a function
        of weights, prompt and stream, up to the last bits, whoever runs beside it. None: any noise. With ``apart`` nothing is
        cached from earlier calls, and the same call gives the same bits on every engine of the same kind.
        """
        self.require(version)
        self._interrupted = False
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.end_ids))
        if apart:
            self._forget_prefixes()
        started: dict[str, tuple[int, int]] = {}
        try:
            for index, prompt in enumerate(prompts):
                # A request for each sample: vLLM would give the samples of one request the streams seed, seed + 1, ...
                for sample in range(sampling.samples):
                    self._requests += 1
                    name = f"r{self._requests}"
                    params = sampling_params(sampling, None if seeds is None else seeds[index][sample])
                    self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
                    started[name] = (index, sample)
            yield from self._collect(started, sampling, version)
        finally:
            if started:  # an error, or the caller gave up: nothing of this call may run on
                self.llm.llm_engine.abort_request(list(started))

    def _collect(
        self, started: dict[str, tuple[int, int]], sampling: Sampling, version: int
    ) -> Iterator[FinishedGroup]:
        since = time.monotonic()
        finished: dict[int, dict[int, Any]] = {}
        while started:
            self.require(version)  # an update may have begun between two groups
            if self._interrupted:
                raise FencedOut("generation was interrupted: another driver took the engine over")
            outputs = self.llm.llm_engine.step()
            self.progress.count("step")
            if not outputs and not self.llm.llm_engine.has_unfinished_requests():
                raise IntegrityError(f"vLLM lost {len(started)} requests: it has none left and did not answer them")
            for output in outputs:
                if not output.finished:
                    continue
                index, sample = started.pop(output.request_id)
                (response,) = output.outputs
                if response.finish_reason not in FINISH_REASONS:
                    raise IntegrityError(f"vLLM ended a sample of a prompt with {response.finish_reason!r}")
                if sampling.logprobs and len(response.logprobs.logprobs) != len(response.token_ids):
                    raise IntegrityError("vLLM returned another number of logprobs than of tokens")
                group = finished.setdefault(index, {})
                group[sample] = response
                if len(group) == sampling.samples:
                    samples = [group[n] for n in range(sampling.samples)]
                    del finished[index]
                    yield FinishedGroup(
                        index=index,
                        token_ids=[list(s.token_ids) for s in samples],
                        logprobs=[list(s.logprobs.logprobs) for s in samples] if sampling.logprobs else [],
                        finish_reasons=[str(s.finish_reason) for s in samples],
                        seconds=time.monotonic() - since,
                    )

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]], version: int) -> list[np.ndarray]:
        """Logprobs at temperature 1 of tokens 1.. of each sequence given what precedes them, float32 [len - 1].

        A sequence that fills the engine's context loses its last token: vLLM wants room for another one.
        """
        from vllm import SamplingParams

        self.require(version)
        sequences = [s[: self.settings.max_model_len - 1] for s in sequences]
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True
        )
        outputs = self.llm.generate([{"prompt_token_ids": list(s)} for s in sequences], params, use_tqdm=False)
        result = []
        for sequence, output in zip(sequences, outputs, strict=True):
            rows = output.prompt_logprobs[1:]
            values = [row[token].logprob for row, token in zip(rows, sequence[1:], strict=True)]
            result.append(np.asarray(values, dtype=np.float32))
        return result

    def begin_update(self) -> None:
        """Open a weight update; until it is finished the engine serves no version at all."""
        self.version = None
        self.llm.collective_rpc("rlhf_begin_update")

    def load_bucket(self, spec: BucketSpec, payload: Any) -> None:
        """Load one packed bucket into every worker."""
        self.llm.collective_rpc("rlhf_load_bucket", args=(spec, payload))

    def finish_update(self, version: int, digest: str) -> str:
        """Close the update. IntegrityError, and no version served, unless every worker received exactly ``digest``."""
        received = set(self.llm.collective_rpc("rlhf_finish_update"))
        if received != {digest}:
            raise IntegrityError(
                f"policy version {version} did not arrive intact: the trainer's digest is {digest}, "
                f"the engine's workers received {sorted(received)}"
            )
        self._forget_prefixes()  # cached keys and values belong to the old weights
        self.version, self.digest = version, digest
        return digest

    def _forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise IntegrityError("the engine still runs requests: it cannot drop the keys and values that it cached")

    def sleep(self, discard_weights: bool) -> None:
        """Give the device's memory back. ``discard_weights``: the next sync overwrites them, so nothing is copied out."""
        if self.settings.sleep and not self._sleeping:
            self.llm.sleep(level=2 if discard_weights else 1)
            self._sleeping = set(SLEEP_TAGS)
            if discard_weights:
                self.version = None

    def wake(self, tags: tuple[str, ...] = SLEEP_TAGS) -> None:
        """Take the device's memory of these tags again, as far as they sleep (mapping memory twice is a CUDA error)."""
        asleep = [tag for tag in tags if tag in self._sleeping]
        if asleep:
            self.llm.wake_up(tags=asleep)
            self._sleeping -= set(asleep)

    def close(self) -> None:
        """Release the engine's memory."""
        engine_core = getattr(self.llm.llm_engine, "engine_core", None)
        if engine_core is not None:
            engine_core.shutdown()
