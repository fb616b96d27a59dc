"""Tiny random models of timm, one for each way in which timm rotates q and k."""

import importlib.util
import sys
from unittest.mock import MagicMock

import torch
from cases import needed
from torch import nn

_PARTS = (
    ".transforms",
    ".transforms.functional",
    ".ops",
    ".ops.misc",
    ".datasets",
    ".models",
    ".models.feature_extraction",
)


def import_timm():
    """Imports and returns timm, which imports torchvision to prepare images.

    The release of torchvision on PyPI does not load beside a CPU build of torch, and while it is installed transformers
    does not load either. So the tests install timm alone, and it sees a mock while it is imported. Its models need
    nothing of torchvision.
    """
    if importlib.util.find_spec("torchvision"):
        return needed("timm", "1.0.31")  # it has all of the models below
    mocks = {f"torchvision{n}": MagicMock() for n in ("", *_PARTS)}
    sys.modules.update(mocks)
    try:
        return needed("timm", "1.0.31")
    finally:
        for name in mocks:
            del sys.modules[name]


timm = import_timm()

from timm.layers import RotAttentionPool2d, create_rope_embed  # noqa: E402
from timm.models.naflexvit import NaFlexVit  # noqa: E402
from timm.models.qwen3_vit import Qwen3VitEncoder  # noqa: E402
from timm.models.vision_transformer_sam import VisionTransformerSAM  # noqa: E402

SMALL = dict(patch_size=4, embed_dim=64, depth=2, num_heads=4)
VIT = SMALL | dict(img_size=16, num_classes=8)
NAFLEX = SMALL | dict(num_classes=8, pos_embed="none", global_pool="avg")
DROP = dict(patch_drop_rate=0.4)


def with_weights(model):
    """Gives the model weights with which attention depends on the positions, and returns it in eval mode.

    timm initializes with small weights, and with scales that almost remove each layer.
    """
    for name, p in model.named_parameters():
        if p.ndim > 1 and not name.endswith("freqs"):
            nn.init.normal_(p, std=1.5 * p.shape[-1] ** -0.5)
        elif "gamma" in name:
            nn.init.ones_(p)
    return model.eval()


def images(height=16, width=16):
    return (torch.randn(2, 3, height, width),)


def vit(name, inputs=images, training=False, **changes):
    """Returns a registered model. With training=True it drops random patches: set the seed before each call."""
    model = timm.create_model(name, pretrained=False, **VIT | changes)
    return with_weights(model).train(training), inputs()


def patches(*grids):
    """Returns a batch of images with different numbers of patches. Shorter sequences are padded."""
    seq = max(height * width for height, width in grids)
    batch = {
        "patches": torch.randn(len(grids), seq, SMALL["patch_size"] ** 2 * 3),
        "patch_coord": torch.zeros(len(grids), seq, 2, dtype=torch.int64),
        "patch_valid": torch.zeros(len(grids), seq, dtype=torch.bool),
    }
    for i, (height, width) in enumerate(grids):
        batch["patch_coord"][i, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        batch["patch_valid"][i, : height * width] = True
    return (batch,)


def sizes():
    return patches((4, 4), (3, 5), (4, 4), (2, 3))


def naflex(rope_type, inputs, training=False, **changes):
    model = NaFlexVit(**NAFLEX | dict(rope_type=rope_type) | changes)
    return with_weights(model).train(training), inputs()


def sam():
    """One block attends within windows of 2 x 2 patches, the other to the whole image."""
    changes = dict(use_rope=True, window_size=2, global_attn_indexes=(1,), neck_chans=32, ref_feat_shape=((8, 8), 2))
    return with_weights(VisionTransformerSAM(**VIT | changes)), images()


def pool(rope_type, **changes):
    """Returns an attention pool and features. The first token is their mean, or a class token."""
    model = RotAttentionPool2d(64, 8, head_dim=16, rope_type=rope_type, **changes)
    return with_weights(model), (torch.randn(2, 64, 3, 5),)


def encoder():
    return with_weights(Qwen3VitEncoder(**SMALL, img_size=24, out_features=16)), images(24, 24)


def rope_module(rope_type, channels=16, **changes):
    """Returns a convolution and a module that rotates the channels of features [batch, channels, height, width]."""
    model = nn.Sequential(nn.Conv2d(3, channels, 1), create_rope_embed(rope_type, 64, 4, **changes))
    return model.eval(), images(3, 5)


# Functions that return (model, arguments of the model). The models differ in the layout of x, in the tables and in the
# pairing:
MODELS = {
    # q, k [batch, heads, tokens, head_dim] without the prefix tokens; tables [tokens, 2 head_dim]; adjacent pairs
    "eva02": lambda: vit("eva02_tiny_patch14_224"),
    "registers": lambda: vit("vit_betwixt_patch16_rope_reg4_gap_256"),
    "axial": lambda: vit("vit_small_patch16_rope_224"),
    "perception encoder": lambda: vit("vit_pe_core_tiny_patch16_384", attn_pool_num_heads=4),
    "attention pool": lambda: pool("cat"),
    "attention pool, two tables": lambda: pool("base", pool_type=""),
    # the same with pairs (i, i + head_dim / 2)
    "dinov3": lambda: vit("vit_small_patch16_dinov3"),
    "sapiens2, fewer heads of k, norms": lambda: vit("vit_base_patch16_sapiens2", num_kv_heads=(4, 2)),
    "mrope": lambda: vit("eva02_tiny_patch14_224", attn_type="rope", rope_type="mrope", rope_mrope_section=(2, 3, 3)),
    "qwen3 vision": encoder,
    # tables per head, from learned frequencies: [heads, tokens, 2 head_dim] in each layer
    "mixed": lambda: vit("vit_small_patch16_rope_mixed_224"),
    # tables per image [batch, 1, tokens, 2 head_dim], which are 0 at padded tokens
    "naflex, axial, patches": lambda: naflex("axial", sizes, class_token=True, rope_ref_feat_shape=(8, 8)),
    "naflex, dinov3, patches": lambda: naflex(
        "dinov3", sizes, rope_rotate_half=True, qk_norm=True, qkv_fused=False, num_kv_heads=2
    ),
    # tables per image and head [batch, heads, tokens, 2 head_dim], 0 at padded tokens, from learned frequencies
    "naflex, mixed, patches": lambda: naflex("mixed", sizes, reg_tokens=2),
    # tables per image of the kept tokens, in random order
    "eva02, dropped patches": lambda: vit("eva02_tiny_patch14_224", training=True, **DROP),
    "dinov3, dropped patches": lambda: vit("vit_small_patch16_dinov3", training=True, **DROP),
    "naflex, mixed, dropped patches": lambda: naflex("mixed", sizes, training=True, **DROP),
    # x [windows heads, tokens, head_dim]
    "sam, windows": sam,
    # x [batch, tokens, head_dim], a transposed view; "base" has two tables
    "module, two tables": lambda: rope_module("base"),
    "module": lambda: rope_module("cat", rotate_half=True),
}
