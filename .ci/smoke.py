"""An installed diffrate, used: the embedded model on its images, compressed, saved and loaded. See .ci/dist-check."""

import importlib.resources
import sys
import tempfile
from pathlib import Path

import torch

import diffrate
from diffrate import embedded

home = Path(diffrate.__file__).resolve()
assert home.is_relative_to(Path(sys.prefix).resolve()), home
files = {file.name for file in importlib.resources.files("diffrate.embedded").iterdir()}
assert {"weights.safetensors", "test.npz", "search.npz", "LICENSE-fashion-mnist.txt"} <= files, files
assert importlib.resources.files("diffrate").joinpath("py.typed").is_file()
for name in ("page.css", "page.js"):
    assert importlib.resources.files("diffrate.report").joinpath(name).is_file()

pixels, labels = embedded.images("test")
images, labels = embedded.normalise(pixels[:100, None]), labels[:100]
model = embedded.model().eval()
kept = [197, 197, 160, 160, 140, 140, 120, 120, 100, 100, 90, 90]
fast = diffrate.compress(model, diffrate.Schedule(kept, kept), operation="merge")
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    diffrate.save(fast, folder)
    again = diffrate.load(folder)
    right = {
        name: int((each(images).argmax(-1) == labels).sum())
        for name, each in {"whole": model, "compressed": fast, "loaded": again}.items()
    }
assert min(right.values()) >= 80, right
assert right["compressed"] == right["loaded"], right
print(f"diffrate {diffrate.__version__} from {home.parent}: {right} of 100 images right")
