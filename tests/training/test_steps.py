"""What a step leaves behind and what it computes: the moving average, and the blocks that run twice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_resume_and_parts import RECIPE, SCHEDULE, images, last, vit
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import diffrate
from diffrate.training import train


def test_the_average_is_that_of_the_weights_after_each_step(tmp_path: Path) -> None:
    """timm's warm-up: 1 - (1 + k)^-3/4 at the k-th step after the first, which is taken as it is; 0.6 at most."""
    fast, after = diffrate.compress(vit(), SCHEDULE), []

    def remember(*_: object) -> None:
        after.append({name: value.cpu().double() for name, value in fast.state_dict().items()})

    watch = register_optimizer_step_post_hook(remember)
    try:
        recipe = replace(RECIPE, ema_decay=0.6, distillation=0.0, lr=5e-3)
        train(fast, images(), images(10), tmp_path, recipe, progress=False)
    finally:
        watch.remove()
    assert len(after) == 6
    decays = [1 - (1 + k) ** -0.75 for k in range(6)]
    assert decays[0] == 0
    assert decays[2] < 0.6 < decays[3]  # both sides of the limit are seen
    average: dict[str, Tensor] = {}
    for decay, weights in zip(decays, after, strict=True):
        kept = min(decay, 0.6)
        average = {
            name: kept * average.get(name, value) + (1 - kept) * value for name, value in weights.items()
        }
    state = load_file(tmp_path / "state.safetensors")
    for name, value in average.items():
        for found in (last(tmp_path)[name], state[f"average/{name}"]):
            torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(state[f"model/{name}"].double(), after[-1][name])
    far = max((average[name] - after[-1][name]).abs().max() for name in average)
    assert far > 1e-3  # it is not the weights themselves


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(("checkpointing", "times"), [(False, 1), (True, 2)])
def test_checkpointed_blocks_run_twice_a_step(
    tmp_path: Path, compressed: bool, checkpointing: bool, times: int
) -> None:
    model = vit()
    trained: nn.Module = diffrate.compress(model, SCHEDULE) if compressed else model
    runs = [0] * len(model.blocks)

    def count(block: int, module: nn.Module) -> None:
        runs[block] += module.training  # neither the average nor the evaluation

    for i, block in enumerate(model.blocks):
        # Before it runs: the second time it stops as soon as it has what the gradient needs.
        block.mlp.register_forward_pre_hook(lambda module, _, i=i: count(i, module))
    recipe = replace(RECIPE, epochs=1, distillation=0.0, grad_checkpointing=checkpointing)
    train(trained, images(), images(10), tmp_path, recipe, progress=False)
    # Two steps. Under a schedule the last block, which has one token left, runs once: its gradient is due at once.
    assert runs == [2 * times, 2 * times, 2 if compressed else 2 * times]
    assert not trained.grad_checkpointing  # the caller's model is as it was
