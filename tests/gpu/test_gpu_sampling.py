"""Random streams on a real GPU, with both of vLLM's model runners. Skipped where there is no CUDA device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.models.smollm2 import prepare_smollm2

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sampling.py"
SIZES = {"prompts": 32, "samples": 4, "prompt-tokens": 24, "new-tokens": 32, "rounds": 1, "memory-fraction": 0.3}
#: vLLM then measures no memory, and other programs may use the GPU meanwhile.
OPTIONS = {"kv_cache_memory_bytes": 1 << 30}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device"),
]


@pytest.mark.parametrize("newer", [True, False], ids=["newer runner", "older runner"])
def test_what_is_drawn_again_is_what_was_drawn(tmp_path, newer):
    model = str(prepare_smollm2("float32", tmp_path))
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), model, "--device=gpu", "--dtype=float32", *sizes, f"--options={json.dumps(OPTIONS)}"],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(int(newer))},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["newer_model_runner"] is newer
    assert report["drawn_again"] > 0.9  # all but what the last bits of a logit decided
