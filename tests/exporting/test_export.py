"""Exported models against PyTorch and against what their files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import diffrate
from conftest import TINY_FLAGS, Ran, check_refused, random_vit
from diffrate import exporting
from diffrate.exporting import aoti, export, onnx_graph
from diffrate.exporting.checking import agreement
from diffrate.reduction import rank

onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")

SHARED = Path(__file__).parents[3] / "shared" / "imagenet"
PRUNE, MERGE = (17, 14, 3), (17, 12, 3)
Cli = Callable[..., Ran]


def compressed(**operator: object) -> diffrate.CompressedModel:
    """16 image tokens, every part of the model with a say in its logits."""
    return diffrate.compress(random_vit(patch_size=8, depth=3), diffrate.Schedule(PRUNE, MERGE), **operator)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "new" / "fast.onnx"
    written = export(compressed(), path, "onnx", images())
    assert (written.images, written.ties) == (5, 0)
    assert written.largest_difference < 1e-4
    assert written.megabytes == pytest.approx(path.stat().st_size / 1e6)
    assert [other.name for other in path.parent.iterdir()] == ["fast.onnx"]
    return path


def test_onnx_gives_what_pytorch_gives_at_any_batch(file: Path) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    fast = compressed()
    for count in (1, 2, 7):
        x = images(count)
        (logits,) = session.run(["logits"], {"images": x.numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(logits), fast(x), atol=1e-4)
    (given,) = session.get_inputs()
    assert isinstance(given.shape[0], str)  # a name: any number
    assert given.shape[1:] == [3, 32, 32]


def test_onnx_has_no_operator_that_runtimes_lack(file: Path) -> None:
    model = onnx.load(file)
    used = {node.op_type for node in model.graph.node}
    assert not [name for name in used if "Scatter" in name or "Unique" in name or "NonZero" in name]
    assert {"TopK", "ArgMax"} <= used  # it does rank and match
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)]
    assert not model.functions


class Ranked(nn.Module):
    def forward(self, importance: Tensor) -> Tensor:
        return rank(importance, 1)


def test_equal_importances_keep_the_earlier_token_in_onnx_too(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    graph = torch.export.export(Ranked(), (torch.rand(2, 200),), dynamic_shapes=({0: batch},))
    onnx_graph.write(graph, tmp_path / "ranked.onnx")
    drawn = torch.randint(0, 5, (3, 200), generator=torch.Generator().manual_seed(0)).float()
    order = onnx_graph.runner(tmp_path / "ranked.onnx")(drawn)
    for row, found in zip(drawn.tolist(), order.tolist(), strict=True):
        assert found == [0, *[1 + i for i in sorted(range(200), key=lambda i: (-row[i], i))]]


def test_torch_export(tmp_path: Path) -> None:
    fast = compressed(choice="cost", operation="merge", mean="attention", keep_norm=True)
    export(fast, tmp_path / "fast.pt2", "torch-export", images())
    program = torch.export.load(tmp_path / "fast.pt2")
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [
        target for target in targets if "diffrate" in target or "scatter" in target or "index_add" in target
    ]
    with torch.no_grad():
        for count in (1, 6):
            assert torch.allclose(program.module()(images(count)), fast(images(count)), atol=1e-5)


def test_safetensors(tmp_path: Path) -> None:
    fast = compressed()
    written = export(fast, tmp_path / "fast", "safetensors", images())
    assert written.largest_difference == 0
    with torch.no_grad():
        assert torch.equal(diffrate.load(tmp_path / "fast")(images()), fast(images()))


@pytest.mark.slow
def test_aoti(tmp_path: Path) -> None:
    small = random_vit(patch_size=16, depth=2)
    fast = diffrate.compress(small, diffrate.Schedule((5, 4), (5, 3)))
    export(fast, tmp_path / "fast.pt2", "aoti", images())
    loaded = torch._inductor.aoti_load_package(str(tmp_path / "fast.pt2"))
    with torch.no_grad():
        assert torch.allclose(loaded(images(7)), fast(images(7)), atol=1e-5)


def test_aoti_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> None:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(diffrate.DiffRateError, match=r"needs a C\+\+ compiler"):
        export(compressed(), tmp_path / "fast.pt2", "aoti")
    with pytest.raises(diffrate.DiffRateError, match="is named"):
        aoti.write(None, tmp_path / "fast.so")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_export_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fast.pt2").write_text("older")
    monkeypatch.setattr(exporting, "traced", lambda model, shape: None)
    for wrong in (lambda x: torch.zeros(len(x), 7), lambda x: torch.full((len(x), 7), torch.nan)):
        monkeypatch.setattr(exporting, "_write", lambda graph, to, path, wrong=wrong: wrong)
        with pytest.raises(diffrate.DiffRateError, match=r"differs from PyTorch by .*: nothing was written"):
            export(compressed(), tmp_path / "fast.pt2", "torch-export")
    assert (tmp_path / "fast.pt2").read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 1


def test_ties_are_told_from_errors() -> None:
    """A model whose answer hangs on the sign of a sum that is zero but for rounding."""
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -2.0]])

    def ours(batch: Tensor) -> Tensor:
        return (batch.sum(dim=1, keepdim=True) > 0).float()

    def theirs(batch: Tensor) -> Tensor:
        return (batch.sum(dim=1, keepdim=True) >= 0).float()

    found = agreement(ours, theirs, x[1:], 1e-3)
    assert (found.largest_difference, found.ties) == (0.0, 0)
    found = agreement(ours, theirs, x, 1e-3)
    assert (found.largest_difference, found.ties) == (0.0, 1)
    found = agreement(ours, lambda batch: theirs(batch) + 0.5, x, 1e-3)
    assert (found.largest_difference, found.ties) == (1.5, 0)  # 1.5 is no answer of ours


def test_wrong_arguments(tmp_path: Path) -> None:
    fast = compressed()
    for arguments, sentence in (
        ((tmp_path / "a", "tflite"), "an export format is one of torch-export, onnx, aoti, safetensors"),
        ((tmp_path, "onnx"), "is a folder"),
        ((tmp_path / "a", "onnx", images(1)), "at least two images"),
        ((tmp_path / "a", "onnx", torch.zeros(2, 3, 8, 8)), "of 3x32x32"),
    ):
        with pytest.raises(diffrate.DiffRateError, match=sentence):
            export(fast, *arguments)
    with pytest.raises(diffrate.DiffRateError, match="is for safetensors alone"):
        export(fast, tmp_path / "a", "onnx", saving={"model": "vit_tiny_patch16_224"})
    assert not list(tmp_path.iterdir())


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command(
    diffrate_cli: Cli, tmp_path: Path, checkpoint: Path, image_folder: Path, tiny_vit: nn.Module
) -> None:
    schedule, kept = tmp_path / "schedule.json", (17, 17, 9, 9)
    diffrate.Schedule(kept, kept).save(schedule)
    flags = [
        "export",
        *TINY_FLAGS,
        "--checkpoint",
        checkpoint,
        "--schedule",
        schedule,
        "--data-dir",
        image_folder,
    ]
    saved = tmp_path / "saved"
    ran = diffrate_cli(*flags, "--to", "safetensors", "--crop-pct", "1.0", "-o", saved)
    assert ran.code == 0, ran.err
    assert "on 12 images of" in ran.out
    assert "random weights" not in ran.err
    assert diffrate.load(saved).pretrained_cfg["crop_pct"] == 1.0
    assert diffrate.load(saved).schedule.merge == kept

    out = tmp_path / "out.json"
    bench = ["--bench", "--batch-size", "2", "--repeats", "4", "--json", out]
    ran = diffrate_cli("export", "--from", saved, "-o", tmp_path / "fast.onnx", *bench)
    assert ran.code == 0, ran.err
    assert "on 3 images of noise" in ran.out
    assert "of MACs saved" in ran.out
    results = json.loads(out.read_text())["results"]
    assert results["largest_difference"] < 1e-4
    assert [row["name"] for row in results["rows"]] == ["uncompressed", "compressed"]
    assert results["rows"][1]["gmacs"] == pytest.approx(
        diffrate.gmacs(tiny_vit, diffrate.Schedule(kept, kept))
    )
    session = onnxruntime.InferenceSession(tmp_path / "fast.onnx", providers=["CPUExecutionProvider"])
    x = images(2)
    with torch.no_grad():
        expected = diffrate.compress(tiny_vit, diffrate.Schedule(kept, kept))(x)
    assert torch.allclose(torch.from_numpy(session.run(None, {"images": x.numpy()})[0]), expected, atol=1e-4)


def test_random_weights_are_told_of(diffrate_cli: Cli, tmp_path: Path) -> None:
    ran = diffrate_cli("export", *TINY_FLAGS, "--to", "safetensors", "-o", tmp_path / "random")
    assert ran.code == 0, ran.err
    assert "the model has random weights" in ran.err


def test_mistakes(diffrate_cli: Cli, tmp_path: Path) -> None:
    output = ["-o", tmp_path / "fast"]
    check_refused(diffrate_cli("export", *output), "give a --model, or --from")
    check_refused(
        diffrate_cli("export", *output, "--from", tmp_path, "--pretrained"), "--from brings its own"
    )
    check_refused(diffrate_cli("export", *output, "--from", tmp_path), "cannot read .*config.json")
    check_refused(
        diffrate_cli("export", *TINY_FLAGS, *output, "--to", "tflite"), "an export format is one of"
    )
    check_refused(diffrate_cli("export", *TINY_FLAGS, *output, "--to", "aoti", "--bench"), "--bench times")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the ImageNet subset is not beside the repository")
def test_a_real_model_on_real_images(diffrate_cli: Cli, tmp_path: Path) -> None:
    """Half of the tokens, in two of the blocks: a published schedule takes a minute to trace."""
    prune = (197, 197, 197, 160, 160, 160, 160, 110, 110, 110, 110, 110)
    merge = (197, 197, 197, 150, 150, 150, 150, 90, 90, 90, 90, 90)
    diffrate.Schedule(prune, merge).save(tmp_path / "schedule.json")
    ran = diffrate_cli(
        "export", "--model", "vit_tiny_patch16_224", "--checkpoint", SHARED / "vit_tiny_patch16_224.safetensors",
        "--schedule", tmp_path / "schedule.json", "--data-dir", SHARED, "--crop-pct", "1.0", "--images", "16",
        "-o", tmp_path / "tiny.onnx", "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["images"] == 16
    assert results["largest_difference"] < 1e-3
