"""Gemmini's model: against RTL cycle counts, Gemmini's tiling written out as loops, and single numbers by hand."""

import itertools
import math

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.vision_transformer import VisionTransformer

import diffrate
from diffrate.costs import Design, GemminiCost, MacCost, Workload
from diffrate.costs.gemmini import PARAMETERS, buildable_designs, is_buildable
from diffrate.costs.gemmini.matmul import Array, Energies, Shape, Tiling, cycles, energy_pj, tiling, traffic
from diffrate.errors import DiffRateError

# FireSim cycle counts of a 16x16 Gemmini (published with ucb-bar/dosa, BSD-2):
# I x K x J, tiles I, J, K, and cycles by (scratchpad, accumulator) KB.
RTL = [
    ((128, 768, 768), (5, 5, 48), {(108, 16): 370440, (256, 64): 345931, (144, 32): 368984}),
    ((128, 64, 128), (5, 6, 4), {(108, 16): 7405, (256, 64): 6706, (144, 32): 6854}),
    ((128, 128, 64), (8, 4, 8), {(108, 16): 7690, (256, 64): 7517, (144, 32): 7472}),
    ((128, 768, 3072), (5, 5, 48), {(108, 16): 1623624, (256, 64): 1533044, (144, 32): 1565908}),
    ((128, 3072, 768), (5, 5, 51), {(108, 16): 1532514, (256, 64): 1518059, (144, 32): 1577878}),
]


def numbers(*values):
    return [torch.tensor(float(v), dtype=torch.float64) for v in values]


@pytest.fixture(scope="module")
def deit():
    with torch.device("meta"):
        return timm.create_model("deit_small_patch16_224")


@pytest.fixture(scope="module")
def workload(deit):
    return Workload.of(timm.create_model("deit_small_patch16_224"))


def test_rtl_cycle_counts(capsys):
    """Mean error over all fifteen, and over the ten that took no part in the calibration."""
    errors = {}
    for (i, k, j), tiles, counts in RTL:
        for (scratchpad, accumulator), wanted in counts.items():
            array = Array.of(Design(scratchpad_kb=scratchpad, accumulator_kb=accumulator).row())
            given = cycles(Shape(*numbers(i, k, j)), array, Tiling(*numbers(*tiles)))
            errors[i, k, j, scratchpad] = abs(float(given) / wanted - 1)
    others = [error for (*_, scratchpad), error in errors.items() if scratchpad != 256]
    mean = sum(errors.values()) / len(errors)
    with capsys.disabled():
        print(
            f"\nRTL: {mean:.1%} mean error of {len(errors)}, {sum(others) / len(others):.1%} of 10 not fitted on"
        )
    assert len(errors) == 15
    assert mean < 0.10
    assert sum(others) / len(others) < 0.10


def test_tilings_are_those_that_gemmini_chose():
    for shape, tiles, _ in RTL:
        found = tiling(Shape(*numbers(*shape)), Array.of(Design().row()))
        assert tuple(int(t) for t in found) == tiles


def slow_tiling(i, k, j, rows, columns, scratchpad, accumulator):
    """Gemmini's loop, one block at a time."""
    most = {"i": math.ceil(i / rows), "j": math.ceil(j / columns), "k": math.ceil(k / rows)}
    side = max(1, math.floor(math.sqrt(accumulator / 2 / (4 * rows * columns))))
    deep = max(1, math.floor(scratchpad / 4 / (rows * max(rows, columns)) / side))
    t = {"i": min(side, most["i"]), "j": min(side, most["j"]), "k": min(deep, most["k"])}
    grew = True
    while grew:
        grew = False
        for axis in "jik":
            more = {**t, axis: t[axis] + 1}
            inputs = more["i"] * more["k"] * rows**2 + more["k"] * more["j"] * rows * columns
            fits = inputs <= scratchpad / 2 and 4 * more["i"] * more["j"] * rows * columns <= accumulator / 2
            if more[axis] <= most[axis] and fits:
                t, grew = more, True
    return t["i"], t["j"], t["k"]


def test_tilings_equal_the_loop_on_many_shapes_and_designs():
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 1600, (60, 3), generator=generator).double()
    designs = torch.stack(
        [
            v[torch.randint(len(v), (60,), generator=generator)]
            for v in map(torch.tensor, PARAMETERS.values())
        ],
        1,
    )
    array = Array.of(designs)
    found = torch.stack(tiling(Shape(*shapes.unbind(1)), array), 1)
    for row, (i, k, j) in enumerate(shapes.int().tolist()):
        memory = array.scratchpad[row], array.accumulator[row]
        slow = slow_tiling(i, k, j, int(array.rows[row]), int(array.columns[row]), *map(float, memory))
        assert tuple(found[row].int().tolist()) == slow


def test_one_product_by_hand():
    """100 x 40 x 50 on an 8x8 array: 13 x 5 x 7 blocks, all of it held at once, bus 16 bytes."""
    design = Design(mesh_rows=8, mesh_columns=8)
    shape, array = Shape(*numbers(100, 40, 50)), Array.of(design.row())
    tiles = tiling(shape, array)
    assert tuple(int(t) for t in tiles) == (13, 7, 5)
    compute = 13 * 7 * 5 * (8 + 3.9)
    first, last = (13 * 8 * 8 + 8 * 7 * 8) / 16, 13 * 8 * 8 / 16
    assert float(cycles(shape, array, tiles)) == pytest.approx(compute + first + last + 16 + 1650)
    mac = 100 * 40 * 50 * (0.561 + 0.487)
    scratchpad = (100 * 40 * 7 + 40 * 50 + 100 * 40 + 40 * 50) * 6.6
    accumulator = (2 * 100 * 50 * 5 + 100 * 50) * (0.1005 * 64 / 8 + 1.94)
    dram = (100 * 40 + 40 * 50 + 100 * 50) * 64
    given = energy_pj(shape, array, tiles, Energies(dram_byte=64.0))
    assert float(given) == pytest.approx(mac + scratchpad + accumulator + dram)


def test_one_bank_and_a_narrow_bus_cost_time():
    shape = Shape(*numbers(197, 384, 1152))

    def taken(**changes):
        array = Array.of(Design(**changes).row())
        return float(cycles(shape, array, tiling(shape, array)))

    assert taken(scratchpad_banks=1) > taken()
    assert taken(mesh_rows=32, mesh_columns=32, bus_bits=64) > 1.5 * taken(
        mesh_rows=32, mesh_columns=32, bus_bits=512
    )


def test_17016_designs_can_be_built():
    designs = buildable_designs()
    assert len(designs) == 17016
    assert len(designs.unique(dim=0)) == 17016
    # Gemmini's conditions on every one of the paper's 128,000, with whole numbers.
    count = 0
    for tr, tc, mr, mc, banks, sp, acc in itertools.product(
        *(PARAMETERS[name] for name in PARAMETERS if name != "bus_bits")
    ):
        side = tr * mr
        rows = [sp * 1024 // side // banks, acc * 1024 // (4 * side) // 2]
        good = (
            side == tc * mc
            and banks > 1
            and all(n >= side and n % side == 0 and n & (n - 1) == 0 for n in rows)
        )
        count += good * len(PARAMETERS["bus_bits"])
    assert count == 17016


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tile_rows": 2}, "square"),
        ({"scratchpad_banks": 1}, "more than one bank"),
        ({"tile_rows": 8, "tile_columns": 8, "mesh_rows": 32, "mesh_columns": 32}, "multiple of 256"),
    ],
)
def test_designs_that_cannot_be_built_are_refused(changes, why):
    design = Design(**changes)
    assert not design.is_buildable
    with pytest.raises(DiffRateError, match=why):
        Design.from_dict(design.__dict__)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"design": {"tile_rows": 1}}', '{"tile_rows": "x"}'])
def test_design_files_that_are_none(tmp_path, text):
    (tmp_path / "design.json").write_text(text)
    with pytest.raises(DiffRateError):
        Design.load(tmp_path / "design.json")


def test_the_papers_baseline(workload):
    """68.1 ms, to which the clock was fitted, and a power near the 156 mW of the paper's table."""
    whole = workload.price(Design().row()[None], [197.0] * 12)
    assert float(whole["latency_ms"]) == pytest.approx(68.1, rel=0.01)
    assert float(whole["power_at_rate_mw"]) == pytest.approx(156, rel=0.15)
    schedule = diffrate.Schedule.published("deit_small_patch16_224", 2.9)
    prices = workload.price(buildable_designs()[::7], [float(n) for n in schedule.effective.merge])
    base = workload.price(buildable_designs()[::7], [197.0] * 12)
    ratio = prices["latency_ms"] / base["latency_ms"]
    assert 0.59 < float(ratio.min()) < 0.61
    assert 0.85 < float(ratio.max()) < 0.93


def test_a_model_is_the_sum_of_its_products(workload):
    """Every product of DeiT-S under a schedule, one by one in a loop."""
    kept = [197, 160, 160, 99, 99, 64, 64, 64, 31, 31, 7, 1]
    design = Design(mesh_rows=32, mesh_columns=32, bus_bits=256, accumulator_kb=128)
    array = Array.of(design.row())
    total_cycles = total_pj = 0.0
    products = [(196, 768, 384), (1, 384, 1000)]
    for n, m in zip([197, *kept[:-1]], kept, strict=True):
        products += [
            (n, 384, 1152),
            (n, 384, 384),
            *[(n, 64, n), (n, n, 64)] * 6,
            (m, 384, 1536),
            (m, 1536, 384),
        ]
    for product in products:
        shape = Shape(*numbers(*product))
        tiles = tiling(shape, array)
        total_cycles += float(cycles(shape, array, tiles))
        total_pj += float(energy_pj(shape, array, tiles, Energies()))
    prices = workload.price(design.row()[None], kept)
    assert float(prices["latency_ms"]) == pytest.approx(total_cycles / 354e3)
    assert float(prices["energy_mj"]) == pytest.approx(total_pj * 1e-9 + 0.02e-3 * total_cycles / 354e3)
    one = GemminiCost(workload, design).price(torch.tensor(kept, dtype=torch.float64))
    for metric, price in prices.items():
        assert float(one[metric]) == pytest.approx(float(price))
    slow = Workload(workload.tokens, workload.blocks, workload.around, vector_ops=True)
    assert slow.price(design.row()[None], kept)["latency_ms"] > prices["latency_ms"]


def test_slopes_see_over_the_steps_of_the_array(workload):
    """At 128 tokens the next 16 cost a whole row of blocks: exact prices jump, slopes do not."""
    cost = GemminiCost(workload)
    kept = torch.full((12,), 130.0, dtype=torch.float64, requires_grad=True)
    cost.price(kept)["latency_ms"].backward()
    at = [float(cost.price(torch.full((12,), float(n)).double())["latency_ms"]) for n in (122, 138, 129, 130)]
    assert at[2] == pytest.approx(at[3], rel=0.01)
    assert float(kept.grad.sum()) == pytest.approx((at[1] - at[0]) / 16, rel=0.2)


def test_the_papers_slopes_are_the_block_s_own_cost(workload):
    """((1 - a) + SG(a)) F' with a = 1 - n / N: F' / N for each token, whatever the true slope is."""
    kept = torch.full((12,), 100.0, dtype=torch.float64, requires_grad=True)
    cost = GemminiCost(workload, slopes="paper")
    cost.price(kept)["latency_ms"].backward()
    mlp_alone = torch.full((12,), 100.0).double()
    without_last = torch.cat([mlp_alone[:-1], torch.zeros(1).double()])
    last = cost.price(mlp_alone)["latency_ms"] - cost.price(without_last)["latency_ms"]
    assert float(kept.grad[-1]) == pytest.approx(float(last) / 197, rel=1e-6)
    with pytest.raises(DiffRateError, match="table, paper"):
        GemminiCost(workload, slopes="steep")


SMALL = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
HF = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}


def transformers_model(kind, **changes):
    transformers = pytest.importorskip("transformers", reason="needs diffrate[hf]")
    config = getattr(transformers, kind).config_class(**HF | changes)
    return getattr(transformers, kind)(config)


def openclip_tower(**changes):
    transformer = pytest.importorskip("open_clip.transformer", reason="needs diffrate[openclip]")
    shape = {"image_size": 32, "patch_size": 8, "width": 48, "layers": 3, "heads": 3, "mlp_ratio": 2.0}
    return transformer.VisionTransformer(**shape, output_dim=20, **changes)


FAMILIES = {
    "timm, distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **SMALL),
    "EVA-02, SwiGLU": lambda: timm.create_model("eva02_tiny_patch14_224", **SMALL),
    "BEiT": lambda: timm.create_model("beit_base_patch16_224", **SMALL),
    "relative positions by an MLP": lambda: timm.create_model("vit_relpos_small_patch16_224", **SMALL),
    "torchvision": lambda: VisionTransformer(32, 8, 3, 3, 48, 96, num_classes=5),
    "OpenCLIP": openclip_tower,
    "transformers' ViT": lambda: transformers_model("ViTForImageClassification", intermediate_size=96),
    "transformers' DINOv2": lambda: transformers_model("Dinov2ForImageClassification", num_labels=5),
    "transformers' CLIP": lambda: transformers_model("CLIPVisionModelWithProjection", projection_dim=20),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_what_torch_counts(family):
    """Those of the blocks and around them, against torch's counter on a forward pass of the model itself."""
    model = FAMILIES[family]().eval()
    workload = Workload.of(model)
    n = workload.tokens
    total = sum(i * k * j for i, k, j in workload.around)
    for block in workload.blocks:
        total += sum(n * i * o for i, o in block.attention + block.mlp)
        total += 2 * block.heads * n * n * block.head_dim
    counts = []
    for batch in (1, 2):  # what makes a bias of positions runs once a batch
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),  # whose products the counter sees one by one
            FlopCounterMode(display=False) as counter,
        ):
            model(torch.zeros(batch, 3, 32, 32))
        counts.append(counter.get_total_flops())
    assert 2 * total == counts[1] - counts[0]
    assert GemminiCost(workload).price_of(None)["latency_ms"] > 0


REFUSED = {
    "attention pooling": (lambda: timm.create_model("vit_base_patch16_siglip_224", **SMALL), "its head attends"),
    "OpenCLIP's pooler": (
        lambda: openclip_tower(attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=2),
        "its head attends",
    ),
    "convolutional stem": (lambda: timm.create_model("lvvit_s", depth=1), "its embedding is more than one"),
    "CAFormer": (lambda: timm.create_model("caformer_s18"), "channel by channel"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_more_than_products_are_refused(family):
    build, reason = REFUSED[family]
    with pytest.raises(DiffRateError, match=f"only MACs: .*{reason}"):
        Workload.of(build())


def test_macs_are_those_of_the_products(deit, workload):
    total = sum(i * k * j for i, k, j in workload.around)
    for block in workload.blocks:
        total += sum(197 * i * o for i, o in block.attention + block.mlp)
        total += 2 * block.heads * 197 * 197 * block.head_dim
    assert total / 1e9 == pytest.approx(
        MacCost.of(timm.create_model("deit_small_patch16_224")).of_schedule(None)
    )


def test_is_buildable_takes_many_designs():
    rows = torch.stack([Design().row(), Design(tile_rows=2).row()])
    assert is_buildable(rows).tolist() == [True, False]


def test_what_does_not_fit_is_loaded_again():
    """256 x 512 x 256 on 16x16 blocks with tiles of 5, 5, 8: 4 trips each way, so A comes J0 and B comes I0 times.

    With all of K in one trip and two along J, B stays in the two halves of the scratchpad.
    """
    shape, array = Shape(*numbers(256, 512, 256)), Array.of(Design().row())
    again = traffic(shape, array, Tiling(*numbers(5, 5, 8)))
    assert (float(again.a), float(again.b)) == (4 * 256 * 512, 4 * 512 * 256)
    stays = traffic(shape, array, Tiling(*numbers(5, 8, 32)))
    assert (float(stays.a), float(stays.b)) == (2 * 256 * 512, 512 * 256)
