"""A run that was interrupted, shared out or checkpointed ends in the weights of an undisturbed one."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import diffrate
from conftest import random_vit
from diffrate import DiffRateError, Schedule, embedded
from diffrate.training import FINETUNE, Recipe, accuracy, finetune, train
from diffrate.training import loop as training_loop
from diffrate.training.batches import share, training_batches, validation_batches
from diffrate.training.objective import Objective, divergence
from diffrate.training.optimizer import build_optimizer

SCHEDULE = Schedule([17, 14, 10], [17, 12, 7])
# Everything that is random, and everything that a state must bring back.
RECIPE = replace(
    FINETUNE, epochs=3, batch_size=8, lr=1e-3, precision="no", ema_decay=0.9, distillation=0.3, layer_decay=0.7,
    clip_grad=1.0,
)  # fmt: skip


def vit(drop_path: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 4}
    return random_vit(**shape, drop_path_rate=drop_path)


class Noisy(TensorDataset):
    """Images that differ a little each time they are read, as augmented ones do."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        return image + 0.1 * torch.randn(image.shape) + 0.1 * float(np.random.rand()), label


def images(count: int = 20) -> Noisy:
    generator = torch.Generator().manual_seed(1)
    return Noisy(
        torch.randn(count, 3, 32, 32, generator=generator), torch.randint(4, (count,), generator=generator)
    )


def tune(
    folder: Path, recipe: Recipe = RECIPE, drop_path: float = 0.1, **options: object
) -> diffrate.training.Trained:
    return finetune(vit(drop_path), SCHEDULE, images(), images(10), folder, recipe, progress=False, **options)


def last(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "last.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, value in b.items():
        if not name.endswith(
            "qkv.bias"
        ):  # that of keys has no gradient but rounding, which AdamW makes large
            torch.testing.assert_close(a[name], value, rtol=1e-3, atol=1e-4, msg=name)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    calls = []

    class Interrupted(Objective):
        def __call__(self, *arguments: object) -> Tensor:
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return super().__call__(*arguments)

    monkeypatch.setattr(training_loop, "Objective", Interrupted)


@pytest.mark.parametrize("call", [2, 5])  # in the first epoch and in the last
def test_a_resumed_run_ends_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    whole = tune(tmp_path / "whole")
    with monkeypatch.context() as patched:
        interrupt_at(patched, call)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "parts", save_minutes=0)
    torch.manual_seed(99)
    np.random.seed(99)
    resumed = tune(tmp_path / "parts", resume=True)
    assert same(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert same(*(load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "parts")))
    for name in ("loss", "accuracy", "lr"):
        assert [epoch[name] for epoch in whole.history] == [epoch[name] for epoch in resumed.history]
    again = tune(tmp_path / "parts", resume=True)  # of a run that is over: nothing happens
    assert again.history == resumed.history


def test_a_resumed_run_in_bf16_ends_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
) -> None:
    """Weights, average and optimiser are kept in fp32, whatever the products are in."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    half, products = replace(RECIPE, precision="bf16"), set()

    class Watched(Objective):
        def __call__(self, model: nn.Module, *batch: Tensor) -> Tensor:
            product = model.original.blocks[1].mlp.fc1
            hook = product.register_forward_hook(lambda *call: products.add(call[-1].dtype))
            loss = super().__call__(model, *batch)
            hook.remove()
            return loss

    with monkeypatch.context() as patched:
        patched.setattr(training_loop, "Objective", Watched)
        whole = tune(tmp_path / "whole", half)
    assert products == {torch.bfloat16}
    with monkeypatch.context() as patched:
        interrupt_at(patched, 4)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "parts", half, save_minutes=0)
    assert {value.dtype for value in load_file(tmp_path / "parts" / "state.safetensors").values()} == {
        torch.float32
    }
    torch.manual_seed(99)
    np.random.seed(99)
    resumed = tune(tmp_path / "parts", half, resume=True)
    assert same(last(tmp_path / "whole"), last(tmp_path / "parts"))
    assert [epoch["loss"] for epoch in whole.history] == [epoch["loss"] for epoch in resumed.history]
    AcceleratorState._reset_state(True)
    single = tune(tmp_path / "single")
    for full, rounded in zip(single.history, whole.history, strict=True):
        assert 0 < abs(full["loss"] - rounded["loss"]) < 0.05  # rounded, and no further off


def test_a_run_goes_on_only_as_it_began(tmp_path: Path) -> None:
    short = replace(RECIPE, epochs=1)
    tune(tmp_path, short)
    with pytest.raises(DiffRateError, match="already holds a training: resume it"):
        tune(tmp_path, short)
    with pytest.raises(DiffRateError, match="was started with another recipe"):
        tune(tmp_path, replace(short, lr=2e-3), resume=True)
    with pytest.raises(DiffRateError, match="holds no training to resume"):
        tune(tmp_path / "nothing", short, resume=True)
    (tmp_path / "state.safetensors").write_bytes(b"half a file")
    with pytest.raises(DiffRateError, match="is not a state to resume from"):
        tune(tmp_path, short, resume=True)


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"accumulate": 4}, {"grad_checkpointing": True}])
def test_parts_of_a_batch_and_checkpointed_blocks_change_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    # Without drop path, which draws anew for each part; mixing, with its pairs, is the same.
    tune(tmp_path / "whole", drop_path=0.0)
    tune(tmp_path / "parts", replace(RECIPE, **changes), drop_path=0.0)
    whole, parts = last(tmp_path / "whole"), last(tmp_path / "parts")
    before = vit(0.0).state_dict()
    check_close(parts, whole)
    assert max((value - before[name]).abs().max() for name, value in whole.items()) > 1e-3  # it did learn


def test_checkpointed_blocks_repeat_what_they_dropped(tmp_path: Path) -> None:
    tune(tmp_path / "whole", drop_path=0.5)
    tune(tmp_path / "again", replace(RECIPE, grad_checkpointing=True), drop_path=0.5)
    check_close(last(tmp_path / "again"), last(tmp_path / "whole"))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_make_up_the_batch_and_keep_the_pairs_that_are_mixed(parts: int) -> None:
    size = 16
    shares = [share(size, part, parts) for part in range(parts)]
    assert sorted(i for each in shares for i in each) == list(range(size))
    batch, labels = torch.randn(size, 3, 8, 8), torch.arange(size) % 4
    mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4)
    np.random.seed(5)
    whole, targets = mix(batch.clone(), labels)
    for chosen in shares:
        np.random.seed(5)
        part, part_targets = mix(batch[chosen].clone(), labels[chosen])
        assert torch.equal(part, whole[chosen])
        assert torch.equal(part_targets, targets[chosen])


@pytest.mark.parametrize("resident", [True, False])
def test_processes_together_see_what_one_sees(resident: bool) -> None:
    recipe = Recipe(batch_size=8, accumulate=2, crop_padding=2, rand_augment=5, erasing=0.5, repeats=1)
    data = embedded.dataset("search") if resident else images(40)

    def parts(process: int, processes: int, recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
        batches = training_batches(data, recipe, torch.device("cpu"), 0)
        return list(batches.parts(3, 6, process, processes))

    alone = parts(0, 1, replace(recipe, accumulate=1))
    both = [parts(process, 2, recipe) for process in (0, 1)]
    for step, (batch, labels) in enumerate(alone):
        for process in (0, 1):
            for round_ in (0, 1):
                part, part_labels = both[process][2 * step + round_]
                chosen = share(8, 2 * process + round_, 4)
                assert torch.equal(part, batch[chosen])
                assert torch.equal(part_labels, labels[chosen])


def test_an_epoch_has_every_image_once_or_some_several_times() -> None:
    numbers = TensorDataset(torch.arange(20.0), torch.arange(20))

    def seen(repeats: int, epoch: int) -> list[int]:
        recipe = Recipe(batch_size=4, repeats=repeats)
        batches = training_batches(numbers, recipe, torch.device("cpu"), 0)
        return [int(i) for _, labels in batches.parts(5 * epoch, 5 * epoch + 5, 0, 1) for i in labels]

    assert sorted(seen(1, 0)) == list(range(20))
    assert sorted(seen(1, 1)) == list(range(20))
    assert seen(1, 0) != seen(1, 1)
    counts = np.bincount(seen(3, 0), minlength=20)
    assert sorted(counts)[-7:] == [2, 3, 3, 3, 3, 3, 3]
    assert counts.sum() == 20


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(DiffRateError, match=r"12 does not fall into 8 equal parts.*multiple of 16"):
        Recipe(batch_size=12).check_parts(8)
    Recipe(batch_size=16).check_parts(8)
    Recipe(batch_size=8, mixup=0, cutmix=0).check_parts(8)
    with pytest.raises(DiffRateError, match="multiple of 4"):
        Recipe(batch_size=2, accumulate=2).check_parts(1)


@pytest.mark.parametrize(("count", "processes"), [(10, 3), (11, 2), (4, 4), (9, 1)])
def test_validation_images_are_shared_out_whole(count: int, processes: int) -> None:
    data = TensorDataset(torch.arange(count), torch.arange(count))
    shares = [list(validation_batches(data, 2, 0, process, processes)) for process in range(processes)]
    assert len({len(each) for each in shares}) == 1  # or processes would wait for each other
    assert sorted(int(i) for each in shares for batch, _ in each for i in batch) == list(range(count))


def test_tokens_are_dropped_while_training(tmp_path: Path) -> None:
    model, counts = vit(), []
    for block in model.blocks:
        block.mlp.register_forward_hook(
            lambda module, given, _: counts.append((module.training, given[0].shape[1]))
        )
    finetune(model, SCHEDULE, images(), images(10), tmp_path, replace(RECIPE, epochs=1), progress=False)
    # the last block only runs for the class token; the teacher is a copy, without hooks that count here
    assert [count for training, count in counts if training] == [17, 12, 1] * 2


def test_the_learning_rate_is_a_cosine_over_the_steps(tmp_path: Path) -> None:
    recipe = replace(RECIPE, epochs=4, lr=2e-3, min_lr=1e-4, layer_decay=1.0)
    history = tune(tmp_path, recipe).history
    expected = [1e-4 + 0.5 * (2e-3 - 1e-4) * (1 + math.cos(math.pi * step / 8)) for step in (2, 4, 6, 8)]
    assert [epoch["lr"] for epoch in history] == pytest.approx(expected)


def test_layers_further_from_the_head_learn_more_slowly() -> None:
    model = vit()
    optimizer, _ = build_optimizer(model, replace(RECIPE, layer_decay=0.5), 10, torch.device("cpu"))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    lr = RECIPE.lr
    assert rates[id(model.head.weight)] == pytest.approx(lr)
    for i, block in enumerate(model.blocks):
        assert rates[id(block.mlp.fc1.weight)] == pytest.approx(lr * 0.5 ** (3 - i))
    assert rates[id(model.patch_embed.proj.weight)] == pytest.approx(lr * 0.5**4)
    assert decays[id(model.blocks[0].mlp.fc1.weight)] == RECIPE.weight_decay
    assert decays[id(model.blocks[0].mlp.fc1.bias)] == 0


def test_distillation_is_hintons() -> None:
    logits, answers = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    p = np.exp(answers.numpy() / 2)
    q = np.exp(logits.numpy() / 2)
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    expected = 4 * np.mean(np.sum(p * (np.log(p) - np.log(q)), axis=1))
    assert float(divergence(logits, answers, 2.0)) == pytest.approx(expected)
    assert float(divergence(logits, logits, 3.0)) == pytest.approx(0, abs=1e-12)


def test_the_teacher_is_the_model_as_it_came() -> None:
    recipe = replace(RECIPE, distillation=1.0, mixup=0.0, cutmix=0.0)
    model, teacher = vit(0.0), vit(0.0)
    batch, labels = torch.randn(6, 3, 32, 32), torch.zeros(6, dtype=torch.long)
    loss = Objective(model, recipe, teacher)
    with torch.no_grad():
        assert float(loss(model, batch, labels)) == pytest.approx(0, abs=1e-6)
        fast = diffrate.compress(model, SCHEDULE)
        expected = float(divergence(fast(batch), teacher(batch), 1.0))
        assert float(loss(fast, batch, labels)) == pytest.approx(expected, rel=1e-5)
        assert expected > 1e-6


def test_the_best_and_the_last_weights_are_kept(tmp_path: Path) -> None:
    model, validation = vit(), TensorDataset(*images(30).tensors)
    recipe = replace(RECIPE, epochs=5, ema_decay=0.0, distillation=0.0, lr=5e-3)
    fast = diffrate.compress(model, SCHEDULE)
    trained = train(fast, images(), validation, tmp_path, recipe, progress=False)
    scores = [epoch["accuracy"] for epoch in trained.history]
    assert trained.epoch == max(range(5), key=lambda i: (scores[i], i)) + 1
    assert accuracy(fast, validation) == pytest.approx(trained.accuracy, rel=1e-12)  # 100 / 3 in two ways
    assert trained.accuracy == max(scores)
    assert not model.training
    other = diffrate.compress(vit(), SCHEDULE).eval()
    other.load_state_dict(last(tmp_path))
    assert accuracy(other, validation) == pytest.approx(scores[-1], rel=1e-12)


def test_gradients_of_a_compressed_model_are_finite_differences() -> None:
    model = vit(0.0).double()
    # Without sizes in the attention, which carry no gradient; the steps are too small to change a choice of tokens.
    fast = diffrate.compress(model, SCHEDULE, proportional=False)
    batch = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast(batch).square().mean().backward()
    direction = [
        torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(1))
        for p in model.parameters()
    ]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True))

    def loss(far: float) -> float:
        with torch.no_grad():
            for parameter, d in zip(model.parameters(), direction, strict=True):
                parameter.add_(d, alpha=far)
            value = float(fast(batch).square().mean())
            for parameter, d in zip(model.parameters(), direction, strict=True):
                parameter.sub_(d, alpha=far)
        return value

    assert slope == pytest.approx((loss(1e-7) - loss(-1e-7)) / 2e-7, rel=1e-5)
    assert abs(slope) > 1e-3


@pytest.mark.parametrize("call", [1, 3])  # after the first epoch and after the last
def test_a_run_that_ended_while_it_validated_goes_on_with_that_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    whole, calls, validate = tune(tmp_path / "whole"), [], training_loop.evaluate

    def interrupted(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return validate(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(training_loop, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "parts", save_minutes=0)
    resumed = tune(tmp_path / "parts", resume=True)
    for name in ("loss", "accuracy", "lr"):
        assert [epoch[name] for epoch in whole.history] == [epoch[name] for epoch in resumed.history]
    assert same(last(tmp_path / "whole"), last(tmp_path / "parts"))
