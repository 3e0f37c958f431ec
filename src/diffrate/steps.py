"""Names for the steps of the walk, so that a profile says where the time goes in the words of the paper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

MARK = "diffrate: "
STEPS = ("embedding", "attention", "ranking", "merge", "MLP", "attention and MLP", "head")


def step(name: str) -> AbstractContextManager[object]:
    """Marks what runs within for a profiler, where one is watching; otherwise nothing."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(MARK + name)
