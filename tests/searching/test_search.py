"""diffrate.search as a whole: budgets, resuming, and what goes wrong."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from timm.data import Mixup

import diffrate
from conftest import random_vit
from diffrate.bench import bench_search
from diffrate.data import UnreadableImageError
from diffrate.methods.schedules import random_schedules
from diffrate.searching import best_of_many, fast, paper, report
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.subject import FEW, SOFT, Subject


@pytest.fixture
def model():
    return random_vit(depth=5)


def run(model, data, budget="60%", **changes):
    return diffrate.search(
        model, data, budget, **{"steps": 8, "batch_size": 8, "patience": 100, "progress": False} | changes
    )


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_schedules_meet_their_budgets(model, data, recipe):
    whole = diffrate.gmacs(model)
    found = run(model, data, "75%,60%", recipe=recipe)
    assert [s.made["budget_gmacs"] for s in found.schedules] == pytest.approx([0.75 * whole, 0.6 * whole])
    for schedule, budget in zip(found.schedules, (0.75 * whole, 0.6 * whole), strict=True):
        assert 0.97 * budget <= diffrate.gmacs(model, schedule) <= budget
        assert schedule.cost["gmacs"] == diffrate.gmacs(model, schedule)
    with torch.no_grad():
        assert diffrate.compress(model, found.schedule)(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_the_search_finds_where_tokens_are_worth_nothing(model, data):
    """With the attention of blocks 3 and 4 silenced, only the tokens that block 1 hands to block 2 matter."""
    with torch.no_grad():
        for block in model.blocks[3:]:
            block.attn.proj.weight.zero_()
            block.attn.proj.bias.zero_()
    found = run(model, data, "60%", steps=60, batch_size=16)
    kept = found.schedule.merge
    assert kept[1] >= 55
    assert kept[2] <= 30
    losses = [entry["loss"] for entry in found.history]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_same_seed_same_schedule_and_model_left_as_it_was(model, data):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = run(model, data), run(model, data)
    assert first.schedule.merge == second.schedule.merge
    assert first.history == second.history
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("recipe", "operator"), [("fast", None), ("fast", diffrate.Operator()), ("paper", None)]
)
@pytest.mark.parametrize("killed_at", [1, 5, 10])
def test_resume_ends_where_an_undisturbed_run_ends(
    model, data, tmp_path, monkeypatch, recipe, operator, killed_at
):
    monkeypatch.setattr(
        best_of_many, "FEWEST", 8
    )  # so that a search this short looks for where to begin as well
    monkeypatch.setattr(best_of_many, "EFFORT", 100)
    begin, begun = best_of_many.BestOfMany.begin, []

    def counted(self, *arguments):
        begun.append(begin(self, *arguments))
        return begun[-1]

    monkeypatch.setattr(best_of_many.BestOfMany, "begin", counted)
    undisturbed = run(model, data, "75%,60%", recipe=recipe, operator=operator)
    cls = fast.FastRecipe if recipe == "fast" else paper.PaperRecipe
    step, calls = cls.step, []

    def killed(self, *arguments):
        calls.append(1)
        if len(calls) > killed_at:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(report, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(cls, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, "75%,60%", recipe=recipe, operator=operator, output=tmp_path / "run")
    monkeypatch.setattr(cls, "step", step)
    begun.clear()
    resumed = run(
        model, data, "75%,60%", recipe=recipe, operator=operator, output=tmp_path / "run", resume=True
    )
    for a, b in zip(undisturbed.schedules, resumed.schedules, strict=True):
        assert (a.prune, a.merge, a.made) == (b.prune, b.merge, b.made)
    assert resumed.history == undisturbed.history
    assert len(begun) == (
        recipe == "fast" and killed_at < 8
    )  # for the second budget; not for one that goes on
    if operator is not None:
        assert {each.operator.operation for each in resumed.schedules} == {"prune-merge"}
        assert any(each.prune != each.merge for each in resumed.schedules)


def test_the_folder_tells_the_whole_story(model, data, tmp_path):
    found = run(model, data, output=tmp_path / "run", name="my_vit")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "state.json", "schedule.json", "history.json", "kept.png"}
    schedule = diffrate.Schedule.load(tmp_path / "run" / "schedule.json")
    assert schedule.to_dict() == found.schedule.to_dict()
    assert schedule.model == "my_vit"
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    assert len(history["steps"]) == 8
    assert history["made"]["command"] == "diffrate.search"
    assert history["made"]["torch"] == torch.__version__
    assert all(entry["gmacs"] <= schedule.made["budget_gmacs"] for entry in history["steps"])
    with Image.open(tmp_path / "run" / "kept.png") as picture:
        assert picture.width > 300


def test_a_folder_holds_one_search(model, data, tmp_path):
    run(model, data, output=tmp_path)
    with pytest.raises(diffrate.DiffRateError, match="already holds a search"):
        run(model, data, output=tmp_path)
    with pytest.raises(diffrate.DiffRateError, match="another seed"):
        run(model, data, output=tmp_path, resume=True, seed=1)
    with pytest.raises(diffrate.DiffRateError, match="no search to resume"):
        run(model, data, output=tmp_path / "elsewhere", resume=True)
    assert run(model, data, output=tmp_path, resume=True).schedule.merge  # a finished one is simply read back


def test_answers_that_are_clearly_worse_on_held_out_images_end_the_search(model, data, monkeypatch):
    checks = itertools.count()
    monkeypatch.setattr(HeldOut, "each", lambda *_: torch.full((8,), 1.0 + next(checks)).double())
    found = run(model, data, steps=20, checks=10, patience=2)
    assert found.schedule.made["best_step"] == 0  # the start: everything later was worse on every image
    assert len(found.history) == 16  # two such checks, once the counts should have arrived


def test_among_answers_that_differ_by_noise_the_last_is_taken(model, data, monkeypatch):
    torch.manual_seed(0)
    first = iter([torch.full((8,), 0.99).double()] * 5)  # four starts and the first check
    monkeypatch.setattr(HeldOut, "each", lambda *_: next(first, (1 + torch.randn(8)).double()))
    found = run(model, data, steps=20, checks=10, patience=2)
    assert found.schedule.made["best_step"] > 0


def test_a_search_begins_between_the_starts_that_held_out_images_cannot_tell_apart(model, data, monkeypatch):
    """Of three, one is first by chance, the last is level with it, and the other behind on every image."""
    losses = [torch.full((8,), level).double() for level in (1.0, 1.2, 1.01)]
    losses[2] += 0.017 * torch.tensor([-1.0, 1.0] * 4)  # behind by 1.7 standard errors
    made, begun = [], []

    def each(_, schedule, temperature=None):
        made.append(schedule.merge)
        return losses[len(made) - 1] if len(made) <= 3 else torch.ones(8).double()

    monkeypatch.setattr(HeldOut, "each", each)
    original = fast.FastRecipe.__init__

    def begin(self, subject, space, operator, budget, steps, start, *rest):
        begun.append(start)
        original(self, subject, space, operator, budget, steps, start, *rest)

    monkeypatch.setattr(fast.FastRecipe, "__init__", begin)
    run(model, data, steps=1)
    both, all_three = (torch.tensor(some).double().mean(dim=0) for some in ((made[0], made[2]), made[:3]))
    assert (both - all_three).abs().max() > 0.9
    assert (
        begun[0].counts - both[: len(begun[0].counts)]
    ).abs().max() < 0.5  # whole counts here; moved back onto the budget


@pytest.mark.parametrize(("gain", "floor"), [(0.5, fast.FLOOR), (-0.5, 0.0), (0.0, 0.0)])
def test_held_out_images_decide_whether_every_token_has_a_floor(model, data, monkeypatch, gain, floor):
    asked = []

    def each(_, schedule, temperature=None):
        asked.append((temperature, schedule.operator.floor))
        return torch.linspace(1, 2, 8).double() - gain * (schedule.operator.floor > 0)

    monkeypatch.setattr(HeldOut, "each", each)
    found = run(model, data, "60%,50%", steps=2)
    assert [ask for ask in asked if ask[0] is not None] == [(SOFT, 0.0), (SOFT, fast.FLOOR)]
    assert [schedule.operator.floor for schedule in found.schedules] == [floor, floor]
    given = run(model, data, steps=2, operator=fast.OPERATOR)
    assert given.schedule.operator.floor == 0  # what was asked for is what runs


@pytest.mark.parametrize("classes", [7, FEW, FEW + 1])
def test_the_divergence_is_of_softened_answers_where_there_are_few_classes(data, classes):
    model = random_vit(depth=3, num_classes=classes)
    images = SearchImages(data, data, 0.25, seed=0)
    held = HeldOut(Subject(model), images, Accelerator(cpu=True), batch_size=5, workers=0)
    schedule = random_schedules(model, 0.7 * diffrate.gmacs(model), [0])[0]
    plain = torch.stack([data[i][0] for i in images.held_out])
    with torch.no_grad():
        whole, answers = (each(plain).double() for each in (model, diffrate.compress(model, schedule)))

    def softened(t: float) -> torch.Tensor:
        each = F.kl_div((answers / t).log_softmax(-1), (whole / t).softmax(-1), reduction="none")
        return t**2 * each.sum(-1)

    assert not torch.allclose(softened(1.0), softened(SOFT), rtol=0.01)
    usual = softened(SOFT if classes <= FEW else 1.0)
    torch.testing.assert_close(held.each(schedule), usual, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(held.each(schedule, 2.0), softened(2.0), rtol=2e-3, atol=1e-6)


def test_clearly_above_is_a_paired_standard_error():
    held = HeldOut.__new__(HeldOut)
    held.accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    base, noise = torch.rand(400).double(), torch.randn(400).double()
    noise = (noise - noise.mean()) / noise.std(unbiased=False)  # a standard error of exactly 1 / 20
    assert held.clearly_above(base + noise + 0.051, base)
    assert not held.clearly_above(base + noise + 0.049, base)
    assert not held.clearly_above(base - 1, base)
    assert held.clearly_above(base + noise + 0.101, base, 2.0)
    assert not held.clearly_above(base + noise + 0.099, base, 2.0)
    assert held.mean(base) == pytest.approx(float(base.mean()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budget": "1%"}, "cannot be met"),
        ({"budget": "100%"}, "asks for nothing: the whole model costs"),
        ({"recipe": "magic"}, "fast, paper"),
        ({"held_out": 1.5}, "held_out between 0 and 1"),
        ({"seed": 10**20}, "seed must be"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_mistakes_are_one_sentence(model, data, changes, sentence):
    with pytest.raises(diffrate.DiffRateError, match=sentence):
        run(model, data, **changes)


def test_too_few_images(model, data):
    with pytest.raises(diffrate.DiffRateError, match="at least 16 images"):
        run(model, data[:10])


def test_labels_out_of_range_stop_the_papers_recipe_alone(model, data):
    wrong = [(image, 7) for image, _ in data]
    with pytest.raises(diffrate.DiffRateError, match="a label 7"):
        run(model, wrong, recipe="paper")
    with pytest.raises(diffrate.DiffRateError, match="have none"):
        run(model, [image for image, _ in data], recipe="paper")
    assert run(model, wrong).schedule.merge == run(model, [image for image, _ in data]).schedule.merge


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_a_loss_that_is_not_a_number_stops_with_the_last_good_state(
    model, data, tmp_path, recipe, monkeypatch
):
    monkeypatch.setattr(report, "SAVE_SECONDS", 0.0)
    cls = fast.FastRecipe if recipe == "fast" else paper.PaperRecipe
    step = cls.step

    def broken(self, images, labels):
        if (self.descent.pace.done if recipe == "fast" else self.done) == 3:
            images = images * float("nan")
        return step(self, images, labels)

    monkeypatch.setattr(cls, "step", broken)
    with pytest.raises(diffrate.DiffRateError, match="the loss is nan at step 3"):
        run(model, data, recipe=recipe, output=tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] == 3
    assert "NaN" not in json.dumps(state)


def mixup():
    return Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=7)


def test_mixed_images_are_mixed_by_the_seed_alone(model, data):
    """timm's Mixup draws from numpy: a resumed run must draw the same, and the caller's own draws go undisturbed."""
    np.random.seed(1)
    first = run(model, data, recipe="paper", mix=mixup(), batch_size=7)  # odd: the last image has no partner
    drawn = np.random.rand()
    second = run(model, data, recipe="paper", mix=mixup(), batch_size=7)
    assert first.history == second.history
    np.random.seed(1)
    assert drawn == np.random.rand()


def test_pooling_heads_that_cannot_mask_tokens_are_refused_by_the_papers_recipe(data):
    for pool in ("map", "max", "avgmax"):
        model = random_vit(depth=4, global_pool=pool, class_token=False)
        with pytest.raises(diffrate.DiffRateError, match="pooling head"):
            run(model, data, recipe="paper")
        with pytest.raises(diffrate.DiffRateError, match="pooling head"):
            bench_search(model, 2, repeats=2)
        assert run(model, data).schedule.merge[0] == 64


def test_models_without_a_choice_or_a_classifier_are_refused(data):
    with pytest.raises(diffrate.DiffRateError, match="2 blocks"):
        run(random_vit(depth=2), data)
    with pytest.raises(diffrate.DiffRateError, match="no classifier"):
        run(random_vit(num_classes=0), data)


def test_a_budget_above_what_is_free_returns_what_costs_nothing(model, data):
    """Dropping all but the class token in the last block already saves more than 1 %."""
    found = run(model, data, "99%")
    images = torch.stack([image for image, _ in data])
    with torch.no_grad():
        whole, compressed = model.eval()(images), diffrate.compress(model, found.schedule)(images)
    torch.testing.assert_close(compressed, whole, rtol=1e-4, atol=1e-4)


def test_the_last_batch_may_hold_nothing_but_an_unreadable_image(model, data):
    class Broken(list):
        def __getitem__(self, index):
            if index == images.held_out[-1]:
                raise UnreadableImageError("cannot read the image 13.png: truncated")
            return super().__getitem__(index)

    images = SearchImages(data, data, 0.2, 0)
    found = run(model, Broken(data), batch_size=7)  # 8 held-out images: the eighth is alone in its batch
    assert found.unreadable == ["cannot read the image 13.png: truncated"]
