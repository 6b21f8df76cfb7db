"""Kernels that Inductor writes for a GPU become machine code of sm_90, and this needs no GPU."""

import importlib.util
import json

import pytest
import torch

from tests.support.command_lines import launch
from tests.support.helpers import Keys, tier

# Without dit: PyTorch built without CUDA has no shapes for the gradient of an embedding in a layer.
MODELS: dict[str, Keys] = {
    "llama": {},
    "gpt2": {},
    "gemma3": {"model__n_layers": 3},
    "qwen3": {},
    "qwen3_moe": {"model__name": "qwen3", "model__preset": "debug_moe"},
    "mixtral": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "float8": {
        "model__name": "llama",
        "model__dim": 128,
        "model__hidden_dim": 192,
        "precision__float8": "tensorwise",
    },
}
CASES = [pytest.param(name, marks=tier(slow=name == "llama", full=name != "llama")) for name in MODELS]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles them by itself")
@pytest.mark.parametrize("model", CASES)
def test_kernels_compile(model: str) -> None:
    """In bfloat16, forward and backward of each kind of layer, and the loss."""
    keys = {"model__name": model, "precision__param": "bfloat16"} | MODELS[model]
    words = [f"--{name.replace('__', '.')}={value}" for name, value in keys.items()]
    done = launch("-m", "tests.support.cross_compile", *words)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(kernels) >= 10
    assert min(kernel["bytes"] for kernel in kernels) > 1000
