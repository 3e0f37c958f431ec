"""What `finetune` leaves in a folder, read back as a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from conftest import TINY, random_vit
from diffrate import Schedule
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.trained import name_of, read_trained
from diffrate.training import Recipe, finetune
from diffrate.training.loop import Run

SCHEDULE = Schedule([17, 14, 10, 6], [17, 12, 8, 4])
RECIPE = Recipe(epochs=3, batch_size=6, lr=1e-3, warmup_epochs=0, repeats=1, precision="no")


@pytest.mark.parametrize("name", ["run", "dynamicvit"])  # a schedule's folder, or its method
def test_the_best_epoch_is_read_and_not_the_last(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs: list[dict[str, Tensor]] = []

    def score(run: Run) -> float:
        epochs.append({key: value.clone() for key, value in run.model.state_dict().items()})
        return [20.0, 50.0, 30.0][len(epochs) - 1]

    monkeypatch.setattr(Run, "_accuracy", score)
    model = random_vit(**TINY)
    dataset = TensorDataset(torch.randn(12, 3, 32, 32), torch.arange(12) % 3)
    under = DynamicViT(model, 0.7) if name == "dynamicvit" else SCHEDULE
    trained = finetune(model, under, dataset, dataset, tmp_path / "run", RECIPE, progress=False)
    assert (trained.epoch, trained.accuracy) == (2, 50.0)
    read = read_trained(tmp_path / "run", random_vit(**TINY))
    assert not read.training
    assert name_of(read, tmp_path / "run") == f"{name}, tuned"
    state = read.state_dict()
    assert state.keys() == epochs[1].keys()
    for key, value in epochs[1].items():
        assert torch.equal(state[key], value), key
    assert any(not torch.equal(value, epochs[2][key]) for key, value in epochs[1].items())
