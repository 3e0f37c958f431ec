"""Random inputs of kernels, on a GPU or, in Triton's interpreter, on a CPU."""

import math

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not multiply bfloat16")
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def heads_of(b, heads, n, d, dtype=torch.float32):
    """q, k, v as a model's projection hands them out: views with gaps."""
    return randn(b, n, 3, heads, d).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)


def probabilities(logits):
    return (logits.double() * math.log(2)).softmax(-1)
