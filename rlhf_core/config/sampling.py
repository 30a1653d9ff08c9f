"""What an engine must not be asked for, because the rollouts would not be what the record says.

A stored run may have such values, so they are no bounds of the types: it stays readable, but does not go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.config.learning import GenerateConfig

#: vLLM raises temperatures between 0 and this one to it, and says so in a log only.
MIN_TEMPERATURE = 0.01

_SPECULATION = "a response would depend on what was drafted, not on its random stream alone"
_OUR_WORKER = "the engine's own worker receives the weights and draws the noise"
_END_TOKENS = "the end tokens come from the model folder, and generate.* says how to sample"
_OTHER_MODEL = "the engine would run another model than the one that is trained"

#: Engine arguments of vLLM that may not be passed on, with the reason and, where there is one, the key to use instead.
REFUSED_OPTIONS = {
    "model": f"{_OTHER_MODEL}: set model.source",
    "model_weights": f"{_OTHER_MODEL}: set model.source",
    "revision": f"{_OTHER_MODEL}: set model.revision",
    "dtype": f"{_OTHER_MODEL}: set model.dtype",
    "hf_overrides": f"{_OTHER_MODEL}: change the model folder's config.json",
    "model_class_overrides": _OTHER_MODEL,
    "tokenizer": f"{_END_TOKENS}: set model.source",
    "skip_tokenizer_init": _END_TOKENS,
    "generation_config": f"{_END_TOKENS}: use generate.stop_token_ids",
    "override_generation_config": f"{_END_TOKENS}: use generate.stop_token_ids",
    "seed": "every sample has a random stream of its own: set seed",
    "logprobs_mode": "the recorded logprobs have to be those of the distribution that was sampled from",
    "logits_processors": "the trainer's logprobs would be those of another distribution",
    "watermark_config": "the trainer's logprobs would be those of another distribution",
    "speculative_config": _SPECULATION,
    "spec_method": _SPECULATION,
    "spec_model": _SPECULATION,
    "spec_tokens": _SPECULATION,
    "worker_cls": _OUR_WORKER,
    "worker_extension_cls": _OUR_WORKER,
    "tensor_parallel_size": "devices are reserved before the engine starts: set resources.tensor_parallel",
    "pipeline_parallel_size": "devices are reserved before the engine starts: set resources.tensor_parallel",
    "data_parallel_size": "devices are reserved before the engine starts: set resources.engines",
}


def check_sampling(generate: GenerateConfig) -> None:
    """ConfigError with every value that would make the rollouts something else than what is recorded."""
    problems = [
        f"generate.engine.{name} = {generate.engine[name]!r}: not possible, {reason}"
        for name, reason in REFUSED_OPTIONS.items()
        if name in generate.engine
    ]
    if generate.temperature < MIN_TEMPERATURE:
        problems.append(
            f"generate.temperature = {generate.temperature}: the engine would silently sample at {MIN_TEMPERATURE}; "
            f"take {MIN_TEMPERATURE} or more"
        )
    if problems:
        raise ConfigError("\n".join(problems))
