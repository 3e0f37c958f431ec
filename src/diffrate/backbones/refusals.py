"""Why models that no family accepts cannot be compressed: the reason a user is told, by where the model is from."""

from __future__ import annotations

from typing import Any

from torch import nn

from diffrate.errors import UnsupportedModelError

WINDOWS = "its attention looks inside windows of a fixed grid, which removed tokens would leave with holes"
POOLED = "it pools or strides its token grid between blocks, which needs every token in its place"
CONVOLUTION = "convolutions between its attention layers need every token in its place"
NO_ATTENTION = "it has no attention between tokens by which they could be ranked"
CHANNELS = "its attention is between channels, so that there is no attention by which tokens could be ranked"
PROJECTOR = "its encoder folds neighbouring patches together for a language model, which needs every token in its place"
RELATIVE = (
    "its attention adds a bias for every pair of positions, which is not gathered for tokens that moved"
)

# By module of timm.models.
TIMM_REASONS = {
    "vision_transformer_sam": WINDOWS,
    "swin_transformer": WINDOWS,
    "swin_transformer_v2": WINDOWS,
    "swin_transformer_v2_cr": WINDOWS,
    "maxxvit": WINDOWS,
    "nest": WINDOWS,
    "gcvit": WINDOWS,
    "tiny_vit": WINDOWS,
    "twins": WINDOWS,
    "davit": WINDOWS,
    "hiera": "its early stages attend inside mask units and pool them, which needs every token in its place",
    "hieradet_sam2": WINDOWS,
    "mvitv2": POOLED,
    "pvt_v2": POOLED,
    "pit": POOLED,
    "levit": POOLED,
    "volo": "outlook attention of its first stage needs every token in its place",
    "convit": "its gated positional attention weighs every pair of grid positions",
    "cait": "its talking heads mix attention between heads, so that it cannot be opened as q, k and v alone",
    "xcit": CHANNELS,
    "tnt": "each of its tokens carries a grid of inner tokens that would have to be merged with it",
    "crossvit": "it runs two sequences of tokens that exchange class tokens",
    "coat": CONVOLUTION,
    "visformer": CONVOLUTION,
    "efficientformer": POOLED,
    "efficientformer_v2": POOLED,
    "mobilevit": CONVOLUTION,
    "edgenext": CONVOLUTION,
    "nextvit": CONVOLUTION,
    "vitamin": "its convolutional stages are not opened up here",
    "naflexvit": "it takes patches of any size with masks; timm's VisionTransformer has most of its models",
    "deepseek_vit": PROJECTOR,
    "gemma4_vit": PROJECTOR,
    "qwen3_vit": PROJECTOR,
    "mlp_mixer": NO_ATTENTION,
    "convnext": NO_ATTENTION,
    "resnet": NO_ATTENTION,
}


# By package of transformers.models.
HF_REASONS = {
    "beit": RELATIVE,
    "data2vec": RELATIVE,
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "hiera": TIMM_REASONS["hiera"],
    "pvt": POOLED,
    "pvt_v2": POOLED,
    "levit": POOLED,
    "segformer": POOLED,
    "cvt": CONVOLUTION,
    "mobilevit": CONVOLUTION,
    "mobilevitv2": CONVOLUTION,
    "convnext": NO_ATTENTION,
    "convnextv2": NO_ATTENTION,
    "resnet": NO_ATTENTION,
    "regnet": NO_ATTENTION,
    "poolformer": NO_ATTENTION,
    **dict.fromkeys(("bit", "efficientnet", "focalnet", "hgnet_v2", "pp_lcnet", "textnet"), NO_ATTENTION),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2"), NO_ATTENTION),
    "donut": WINDOWS,
    "swiftformer": CONVOLUTION,
    "imagegpt": "its attention is causal over pixels",
    "perceiver": "its latents are not tokens of patches",
    "timm_wrapper": "it wraps a timm model: compress model.timm_model",
    "vit_mae": "it drops patches at random while it embeds; load its weights as a ViTModel",
    "siglip2": "it takes padded patches of any size with masks; SigLIP 2 of fixed size loads as a SiglipVisionModel",
    "clip": "only its vision tower can be: compress model.vision_model",
    "siglip": "only its vision tower can be: compress model.vision_model",
}


# By class of open_clip.
OPEN_CLIP_REASONS = {
    **dict.fromkeys(
        ("CLIP", "CustomTextCLIP", "CoCa"), "only its vision tower can be: compress model.visual"
    ),
    "TimmModel": "it wraps a timm model: compress model.trunk",
    "ModifiedResNet": NO_ATTENTION,
}


def refusal(model: nn.Module, reason: str) -> UnsupportedModelError:
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    name = config.get("architecture") or type(model).__name__
    return UnsupportedModelError(f"{name} cannot be compressed: {reason}")


def reason_for(model: nn.Module) -> str | None:
    """Why this model cannot be compressed, where that is known."""
    module = type(model).__module__
    if module.startswith("timm.models."):
        return TIMM_REASONS.get(module.removeprefix("timm.models."))
    if module.startswith("transformers.models."):
        return HF_REASONS.get(module.split(".")[2])
    if module.startswith("open_clip."):
        return OPEN_CLIP_REASONS.get(type(model).__name__)
    return None
