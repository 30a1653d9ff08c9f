"""Whether the longest sequence fits into the cache of an engine on CPU."""

from __future__ import annotations

import pytest

from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError
from rlhf_core.models import ModelFacts
from tasks.preflight import check_cache

#: A token takes 1 KiB in float32, and 1 GiB / 1 KiB = 1,048,576 tokens fit into 1 GiB.
ELEMENTS = 256


def facts(elements=ELEMENTS, context=2_000_000):
    return ModelFacts(
        architecture="LlamaForCausalLM",
        context_length=context,
        vocab_size=400,
        eos_ids=(2,),
        cached_per_token=elements,
    )


def config(prompt_tokens=None, dtype="float32", cache=1.0, **engine):
    return parse_config(
        {
            "model": {"source": "m", "dtype": dtype},
            "prompts": {"max_prompt_tokens": prompt_tokens},
            "generate": {"max_new_tokens": 9, "engine": engine},
            "resources": {"kv_cache_gib": cache},
        }
    )


def test_a_sequence_that_does_not_fit_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError) as caught:
        check_cache(config(), facts())
    for words in (
        "resources.kv_cache_gib = 1 holds 1048576 tokens of m",
        "2000000 tokens x 1024 bytes = 1.91 GiB",
        "prompts.max_prompt_tokens (now None;",
        "generate.max_new_tokens = 9",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"generate.engine.max_model_len \(now 1048577;"):
        check_cache(config(max_model_len=1_048_577), facts())


def test_what_fits_passes():
    check_cache(config(1_048_566), facts())
    with pytest.raises(ConfigError, match=r"prompts.max_prompt_tokens \(now 1048567;"):
        check_cache(config(1_048_567), facts())
    check_cache(config(dtype="bfloat16", cache=1.91), facts())
    check_cache(config(max_model_len=1_048_576), facts())


@pytest.mark.parametrize("engine", [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_memory_bytes": 1}])
def test_what_cannot_be_known_passes(engine):
    check_cache(config(**engine), facts(elements=ELEMENTS if engine else None))
