"""Compressed models on the Hugging Face hub: `push_to_hub` and `from_pretrained`, through huggingface_hub's mixin.

A repository holds the folder that `diffrate.save` writes and a model card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from diffrate.errors import DiffRateError

CARD = """---
{{ card_data }}
---

A vision transformer that drops tokens block by block, compressed with [diffrate](https://arxiv.org/abs/2305.17997).

```python
import diffrate

model = diffrate.CompressedModel.from_pretrained("REPOSITORY")
```
"""
Model = TypeVar("Model", bound="HubModel")


class HubModel(
    ModelHubMixin,
    library_name="diffrate",
    tags=["token-merging", "token-pruning"],
    pipeline_tag="image-classification",
    paper_url="https://arxiv.org/abs/2305.17997",
    model_card_template=CARD,
):
    """What a compressed model can do with the hub."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        # The mixin would collect the arguments of __init__ as a configuration; ours is what diffrate.save writes.
        return object.__new__(cls)

    def _save_pretrained(self, save_directory: Path) -> None:
        from diffrate.saving import save

        save(self, save_directory)  # type: ignore[arg-type]  # the only class that has this mixin

    @classmethod
    def from_pretrained(cls: type[Model], pretrained_model_name_or_path: str | Path, **options: Any) -> Model:
        """The model of a repository on the hub, or of a folder; options are those of huggingface_hub's mixin."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **options)
        except DiffRateError:
            raise
        except (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            HFValidationError,
            OSError,
            ValueError,
            AttributeError,
        ) as error:
            raise DiffRateError(
                f"cannot load {pretrained_model_name_or_path}: {_first_line(error)}"
            ) from error

    @classmethod
    def _from_pretrained(  # what __init__ would take is read from the folder
        cls, *, model_id: str, revision: str | None, cache_dir: Any, force_download: bool, local_files_only: bool,
        token: Any, **_: Any,
    ) -> Any:  # fmt: skip
        from diffrate.saving import CONFIG, WEIGHTS, load

        if Path(model_id).is_dir():
            return load(model_id)
        return load(
            snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
                allow_patterns=[CONFIG, WEIGHTS],
            )
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
