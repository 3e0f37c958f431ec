"""Which path a block takes, and that the fast one gives a compressed model the logits of the plain one."""

from contextlib import nullcontext

import pytest
import torch
from kernel_inputs import DEVICE, HALF
from torch._dynamo.testing import CompileCounterWithBackend

import diffrate
from conftest import random_vit
from diffrate import DiffRateError, Operator, Schedule, kernels
from diffrate.backbones import backbone_of
from diffrate.backbones.base import Attention
from diffrate.compressed import with_kernels
from diffrate.kernels import ops, patches, removal
from diffrate.mixing import mix
from diffrate.searching.many import logits_of_many
from diffrate.tokens import Tokens, rows, start

pytest.importorskip("triton", reason="Triton is not installed")

CLASS = Operator(importance="class-attention")
# Nothing, pruning and merging, nothing but with sizes, and merging down to the class token and two more.
SCHEDULE = Schedule([17, 15, 12, 6], [17, 12, 12, 3])


@pytest.fixture
def model():
    return random_vit(patch_size=8, depth=4).to(DEVICE)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """On a CPU, dispatch as if on a GPU."""
    monkeypatch.setattr(kernels, "INTERPRETED", DEVICE == "cpu")


@pytest.fixture
def calls(monkeypatch):
    """Counts the reductions that ran as kernels."""
    counted = []
    rank = ops.rank
    monkeypatch.setattr(ops, "rank", lambda *arguments: counted.append(1) or rank(*arguments))
    return counted


def half_on_a_gpu():
    """Attention in training is ours in half precision; in the interpreter, in any."""
    return torch.autocast("cuda", torch.bfloat16) if DEVICE == "cuda" else nullcontext()


def plain(fast, images):
    with kernels.using("plain"), torch.no_grad():
        return fast(images)


SEARCHED = {"operation": "merge", "mean": "attention", "choice": "cost", "image_share": 0.2}


@pytest.mark.parametrize("memory", [0.0, 0.4])
def test_schedules_that_share_a_walk_share_the_kernels(model, images, calls, memory, monkeypatch):
    """Whose order of tokens, norms and sizes are parts of a batch there."""
    monkeypatch.setattr(kernels, "_plain_is_faster", lambda _: False)
    operator = Operator(**SEARCHED, keep_norm=True, memory=memory)
    kept = ([17, 12, 9, 1], [17, 12, 8, 1], [17, 10, 8, 1], [17, 17, 8, 1])
    schedules = [Schedule(each, each, operator=operator) for each in kept]
    with torch.no_grad():
        got = logits_of_many(backbone_of(model), images, schedules)
    assert len(calls) < sum(len(set(each)) - 1 for each in kept)
    assert calls
    for each, schedule in zip(got, schedules, strict=True):
        wanted = plain(diffrate.compress(model, schedule), images)
        torch.testing.assert_close(each, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "auto"),
        (SEARCHED, "auto"),
        ({**SEARCHED, "keep_norm": True}, "auto"),
        ({"operation": "prune"}, "auto"),
        ({"mean": "size"}, "auto"),
        ({"proportional": False}, "auto"),
        ({"operation": "merge", "mean": "attention", "choice": "cost", "memory": 0.4}, "auto"),
        ({"mean": "attention", "memory": 0.4}, "auto"),
    ],
    ids=str,
)
@pytest.mark.parametrize("few", [True, False])
def test_both_paths_give_the_same_logits(model, images, calls, changes, path, few, monkeypatch):
    monkeypatch.setattr(kernels, "FEW_HEADS", 64 if few else 0)
    monkeypatch.setattr(kernels, "_plain_is_faster", lambda _: False)  # on a GPU, in fp32 of so few images
    fast = diffrate.compress(model, SCHEDULE, **changes)
    with kernels.using(path), torch.no_grad():
        ours, tokens = fast(images), fast.forward_tokens(images)
    assert len(calls) == 3  # two blocks for the tokens; for the logits alone the last one ranks nothing
    torch.testing.assert_close(ours, plain(fast, images), rtol=1e-4, atol=1e-4)
    assert tokens.count == 3
    assert len(calls) == 3


def test_attention_in_training_is_one_kernel_once_tokens_have_sizes(model, images, monkeypatch):
    called, attend = [], ops.attend_training
    monkeypatch.setattr(ops, "attend_training", lambda *given: called.append(given[-1]) or attend(*given))
    fast = diffrate.compress(model, SCHEDULE)
    with half_on_a_gpu():
        fast.forward_tokens(images)
        assert called == [False, True]  # what removes nothing, and what ranks as well
        with torch.no_grad():
            fast.forward_tokens(images)
    assert len(called) == 2


@pytest.mark.parametrize("learning", ["q", "k", "v"])
def test_adapters_of_queries_keys_or_values_alone_get_their_gradients(model, images, learning):
    """What needs no gradient itself must not take the path that has none."""
    heads = dict(zip("qkv", torch.randn(3, 2, 3, 9, 8, device=DEVICE), strict=True))
    heads[learning].requires_grad_()
    size = 1 + torch.rand(2, 9, device=DEVICE)
    attention = Attention(*heads.values(), 8**-0.5, 0.0)
    for few in (0, 64):  # images x heads
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "FEW_HEADS", few)
            for mixed in (
                kernels.attend(attention, size, size.log()),
                kernels.attend_and_score(attention, size, size.log(), 1, Operator())[0],
            ):
                wanted = mix(attention, size.log())
                found, theirs = (
                    torch.autograd.grad(out.square().sum(), heads[learning])[0] for out in (mixed, wanted)
                )
                torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-4)


def test_a_second_gradient_is_refused_and_not_wrong():
    heads = torch.randn(3, 1, 2, 5, 16, device=DEVICE)
    q, k, v = (t.detach().requires_grad_() for t in heads.unbind())
    mixed = kernels._attend_training(Attention(q, k, v, 0.25, 0.0), torch.ones(1, 5, device=DEVICE), False)[0]
    x = torch.randn(1, 5, 8, device=DEVICE, requires_grad=True)
    ranked = kernels.Ranked(*ops.rank(torch.randn(1, 2, 1, 5, device=DEVICE), 1, 0.0))
    left = kernels.reduce_tokens(Tokens(x, 1), ranked, 5, 3, Operator())[0].x
    for out, leaf in ((mixed, q), (left, x)):
        (found,) = torch.autograd.grad(out.pow(3).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            found.sum().backward()


@pytest.mark.parametrize("count", [3, 5])
def test_sums_and_norms_are_one_kernel_also_in_what_removes_nothing(model, count, monkeypatch):
    added, add_norm = [], ops.add_norm
    monkeypatch.setattr(ops, "add_norm", lambda *given: added.append(1) or add_norm(*given))
    fast, images = diffrate.compress(model, SCHEDULE), torch.randn(count, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        ours = fast(images)
    assert len(added) == 5  # twice in a block that removes nothing; once where tokens go
    torch.testing.assert_close(ours, plain(fast, images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("most", [0, 4])
def test_a_norm_that_no_kernel_knows_leaves_a_block_of_many_images_to_the_model(
    model, images, affine, most, monkeypatch
):
    monkeypatch.setattr(kernels, "FEW_IMAGES", most)
    own = []
    model.blocks[0].register_forward_hook(lambda *_: own.append(1))
    if not affine:
        model.blocks[0].norm2 = torch.nn.LayerNorm(model.embed_dim, elementwise_affine=False).to(DEVICE)
    fast = diffrate.compress(model, SCHEDULE)
    with torch.no_grad():
        ours = fast(images)
    assert len(own) == (not affine and most == 0)
    torch.testing.assert_close(ours, plain(fast, images), rtol=1e-4, atol=1e-4)


def test_without_a_schedule_a_model_is_the_original_to_the_bit_where_kernels_run_too(model, images):
    own = []
    model.blocks[0].register_forward_hook(lambda *_: own.append(1))
    with torch.no_grad():
        assert torch.equal(diffrate.compress(model)(images), model(images))
    assert len(own) == 2


def test_the_whole_model_with_all_kernels(model, images, monkeypatch):
    """What a speed-up is held against: patches by a product, and sums and norms at once, in every block."""
    added, add_norm, projected, project = [], ops.add_norm, [], patches.project
    monkeypatch.setattr(ops, "add_norm", lambda *given: added.append(1) or add_norm(*given))
    monkeypatch.setattr(patches, "project", lambda *given: projected.append(1) or project(*given))
    model, images = model.half(), images.half()
    whole = with_kernels(model)
    with torch.no_grad():
        got = whole(images)
        assert (len(projected), len(added)) == (1, 2 * 4 - 1)  # no norm of a block comes after the last sum
        torch.testing.assert_close(got, model(images), rtol=0.1, atol=1.0)
    assert diffrate.gmacs(whole) == diffrate.gmacs(model)


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_a_norm_of_which_a_part_is_trained_gets_its_gradient(model, images, trained):
    """Behind frozen blocks, whose tokens want none."""
    found = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in (f"blocks.1.norm1.{trained}", f"blocks.2.norm2.{trained}"))
    for path in ("auto", "plain"):
        model.zero_grad()
        with kernels.using(path):
            diffrate.compress(model, Schedule([17, 17, 17, 9], [17, 17, 17, 9]))(
                images
            ).square().sum().backward()
        found[path] = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    assert len(found["plain"]) == 2
    for name, gradient in found["plain"].items():
        torch.testing.assert_close(found["auto"][name], gradient, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(model, images, dtype):
    fast = diffrate.compress(model.to(dtype), SCHEDULE)
    with torch.no_grad():
        logits = fast(images.to(dtype))
    # Weights of std 0.3 make logits of about 10; both paths round in their own order.
    torch.testing.assert_close(logits, plain(fast, images.to(dtype)), rtol=0.1, atol=1.0)


def test_inference_mode_and_mean_pooling(images, calls):
    model = random_vit(patch_size=8, global_pool="avg", reg_tokens=2).to(DEVICE)
    fast = diffrate.compress(model, Schedule([19, 15, 12, 12], [19, 12, 10, 10], prefix=3))
    with torch.inference_mode():
        ours = fast(images)
    assert len(calls) == 2
    torch.testing.assert_close(ours, plain(fast, images), rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_do_runs_plainly(model, images, calls):
    fast = diffrate.compress(model, SCHEDULE)
    with torch.no_grad():
        fast(images, return_tokens=True)  # patch maps
        diffrate.compress(model, SCHEDULE, operation="merge-prune")(images)
        for importance in ("image-attention", "class-attention-value", "random"):
            diffrate.compress(model, SCHEDULE, importance=importance)(images)
        diffrate.compress(model)(images)
        diffrate.compress(model.double(), SCHEDULE)(images.double())
    assert not calls


@pytest.mark.parametrize(
    "changes",
    [{}, {"mean": "size"}, SEARCHED, {**SEARCHED, "keep_norm": True}, {**SEARCHED, "memory": 0.5}],
)
def test_gradients_are_those_of_the_plain_path(model, images, calls, changes):
    fast = diffrate.compress(model, Schedule([17, 15, 11, 6], [17, 12, 9, 3]), **changes)
    found = {}
    for path in ("auto", "plain"):
        model.zero_grad()
        with kernels.using(path):
            fast(images).square().sum().backward()
        found[path] = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert len(calls) == 2  # blocks 1 and 2; block 3 runs for the class token alone
    for name, gradient in found["plain"].items():
        torch.testing.assert_close(found["auto"][name], gradient, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("tokens", "operator", "expected"),
    [
        (start(torch.zeros(1, 9, 32), 1, track=False), CLASS, True),
        (start(torch.zeros(1, 9, 32), 1, track=True), CLASS, False),
        (start(torch.zeros(1, 2000, 32), 1, track=False), CLASS, False),
        (Tokens(torch.zeros(1, 9, 32, dtype=torch.float64), 1), CLASS, False),
        (Tokens(torch.zeros(1, 9, 32, requires_grad=True), 1), CLASS, True),
        (start(torch.zeros(1, 9, 32), 1, track=False), Operator(importance="random"), False),
    ],
)
def test_the_choice(tokens, operator, expected, monkeypatch):
    assert kernels.fast(tokens, operator) is expected or DEVICE == "cuda"
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not kernels.fast(tokens, operator)  # the tensors are on a CPU
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    monkeypatch.setattr(kernels, "_available", False)  # Triton is missing
    assert not kernels.fast(tokens, operator)


def test_an_unknown_path_is_refused():
    with pytest.raises(DiffRateError, match="auto, plain"), kernels.using("cuda"):
        pass


@pytest.mark.slow
def test_compiles_whole_once_for_all_batch_sizes(images):
    model = random_vit(patch_size=16, depth=3).to(DEVICE)
    fast = diffrate.compress(model, Schedule([5, 4, 3], [5, 3, 3]))
    images = torch.cat([images, images])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fast, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch, compilations in ((2, 1), (3, 2), (5, 2), (2, 2)):  # the second one has a dynamic batch
            ours = compiled(images[:batch])
            torch.testing.assert_close(ours, fast(images[:batch]), rtol=1e-5, atol=1e-5)
            assert counter.frame_count == compilations
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("diffrate.reduce" in target for target in targets) == 2  # one in each compilation


@pytest.mark.slow
def test_training_compiles_to_the_same_gradients(images):
    model = random_vit(patch_size=16, depth=4).to(DEVICE)
    fast = diffrate.compress(model, Schedule([5, 5, 4, 3], [5, 4, 3, 3]))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    for forward in (torch.compile(fast, fullgraph=True, backend=counter), fast):
        model.zero_grad(set_to_none=True)
        with half_on_a_gpu():
            forward(images).float().logsumexp(-1).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    for step in ("diffrate.reduce_mapped", "diffrate.attend_training"):
        assert sum(step in target for target in targets) == 2, step  # the first of attention also ranks


@pytest.mark.slow
def test_exports_with_the_kernels(images):
    model = random_vit(patch_size=16, depth=3).to(DEVICE)
    fast = diffrate.compress(model, Schedule([5, 4, 3], [5, 3, 3]))
    with torch.no_grad():
        batch = torch.export.Dim("batch", min=1, max=64)
        exported = torch.export.export(fast, (images[:2],), dynamic_shapes=({0: batch},))
        assert sum("diffrate.reduce" in str(node.target) for node in exported.graph.nodes) == 1
        torch.testing.assert_close(exported.module()(images), fast(images), rtol=1e-5, atol=1e-5)


def test_tokens_are_measured_where_attention_is_added(model, images, monkeypatch):
    added, add = [], ops.add_measured
    monkeypatch.setattr(ops, "add_measured", lambda *given: added.append(1) or add(*given))
    measured, lengths = [], removal.lengths
    monkeypatch.setattr(removal, "lengths", lambda *given: measured.append(1) or lengths(*given))
    fast = diffrate.compress(model, Schedule([17, 15, 11, 6], [17, 12, 9, 3]))
    with torch.no_grad():
        fast(images)
    assert (len(added), len(measured)) == (2, 0)  # blocks 1 and 2; block 3 runs for the class token alone
    fast(images)
    assert (len(added), len(measured)) == (2, 2)  # in training a sum is torch's


@pytest.mark.parametrize("count", [3, 5])  # images: few, and more
@pytest.mark.parametrize("name", ["attn.proj", "mlp.fc2"])
@pytest.mark.parametrize("block", [0, 1, 2])  # removes nothing, prunes and merges, removes nothing
def test_one_layer_that_learns_alone_gets_its_gradient(model, block, name, count):
    """What is added to tokens that do not learn may itself."""
    model.requires_grad_(False)
    weight = model.get_submodule(f"blocks.{block}.{name}").weight.requires_grad_()
    fast, images = diffrate.compress(model, SCHEDULE), torch.randn(count, 3, 32, 32, device=DEVICE)
    found = []
    for path in ("auto", "plain"):
        weight.grad = None
        with kernels.using(path):
            fast(images).square().sum().backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_a_part_of_a_batch_keeps_the_lengths_of_its_tokens():
    x = torch.randn(3, 5, 8, device=DEVICE)
    part = rows(Tokens(x, 1, length=x.norm(dim=-1)), slice(1, 3))
    assert torch.equal(part.length, x[1:3].norm(dim=-1))
    assert part.with_features(2 * part.x).length is None
