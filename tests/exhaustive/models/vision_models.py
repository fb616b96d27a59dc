"""Tiny random models of timm, one for each way in which timm rotates q and k."""

import importlib.util
import inspect
import sys
from unittest.mock import MagicMock

import torch
from cases import needed
from torch import nn


def import_timm():
    """Imports and returns timm, which imports torchvision to prepare images.

    The release of torchvision on PyPI does not load beside a CPU build of torch, and while it is installed transformers
    does not load either. So the tests install timm alone, and it sees a mock while it is imported. Its models need
    nothing of torchvision.
    """
    parts = ["", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc"]
    parts += [".transforms", ".transforms.functional"]
    mocks = {} if importlib.util.find_spec("torchvision") else {f"torchvision{n}": MagicMock() for n in parts}
    sys.modules.update(mocks)
    try:
        return needed("timm", "1.0.31")  # it has all of the models below
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


def images(height=16, width=16):
    return torch.randn(2, 3, height, width)


def patches():
    """Returns a batch of images with different numbers of patches. Shorter sequences are padded."""
    grids = (4, 4), (3, 5), (4, 4), (2, 3)
    batch = {
        "patches": torch.randn(len(grids), 16, SMALL["patch_size"] ** 2 * 3),
        "patch_coord": torch.zeros(len(grids), 16, 2, dtype=torch.int64),
        "patch_valid": torch.zeros(len(grids), 16, dtype=torch.bool),
    }
    for i, (height, width) in enumerate(grids):
        batch["patch_coord"][i, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        batch["patch_valid"][i, : height * width] = True
    return batch


def vit(name, **changes):
    return timm.create_model(name, pretrained=False, **VIT | changes), images()


def naflex(rope_type, **changes):
    return NaFlexVit(**NAFLEX | dict(rope_type=rope_type) | changes), patches()


def sam():
    """One block attends within windows of 2 x 2 patches, the other to the whole image."""
    changes = dict(use_rope=True, window_size=2, global_attn_indexes=(1,), neck_chans=32, ref_feat_shape=((8, 8), 2))
    return VisionTransformerSAM(**VIT | changes), images()


def pool(rope_type, **changes):
    """Returns an attention pool and features. The first token is their mean, or a class token."""
    return RotAttentionPool2d(64, 8, head_dim=16, rope_type=rope_type, **changes), torch.randn(2, 64, 3, 5)


def rope_module(rope_type, **changes):
    """Returns a convolution and a module that rotates the channels of features [batch, channels, height, width]."""
    return nn.Sequential(nn.Conv2d(3, 16, 1), create_rope_embed(rope_type, 64, 4, **changes)), images(3, 5)


# Functions that return (model, input). The models differ in the layout of x, in the tables and in the pairing:
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
    "qwen3 vision": lambda: (Qwen3VitEncoder(**SMALL, img_size=24, out_features=16), images(24, 24)),
    # tables per head, from learned frequencies: [heads, tokens, 2 head_dim] in each layer
    "mixed": lambda: vit("vit_small_patch16_rope_mixed_224"),
    # tables per image [batch, 1, tokens, 2 head_dim], which are 0 at padded tokens
    "naflex, axial, patches": lambda: naflex("axial", class_token=True, rope_ref_feat_shape=(8, 8)),
    "naflex, dinov3, patches": lambda: naflex(
        "dinov3", rope_rotate_half=True, qk_norm=True, qkv_fused=False, num_kv_heads=2
    ),
    # tables per image and head [batch, heads, tokens, 2 head_dim], 0 at padded tokens, from learned frequencies
    "naflex, mixed, patches": lambda: naflex("mixed", reg_tokens=2),
    # tables per image of the kept tokens, in random order
    "eva02, dropped patches": lambda: vit("eva02_tiny_patch14_224", patch_drop_rate=0.4),
    "dinov3, dropped patches": lambda: vit("vit_small_patch16_dinov3", patch_drop_rate=0.4),
    "naflex, mixed, dropped patches": lambda: naflex("mixed", patch_drop_rate=0.4),
    # x [windows heads, tokens, head_dim]
    "sam, windows": sam,
    # x [batch, tokens, head_dim], a transposed view; "base" has two tables
    "module, two tables": lambda: rope_module("base"),
    "module": lambda: rope_module("cat", rotate_half=True),
}


def make(name):
    """Returns a model and its arguments by name.

    timm initializes with small weights, and with scales that almost remove each layer. The model gets weights with which
    attention depends on the positions.
    """
    model, x = MODELS[name]()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and not key.endswith("freqs") and not isinstance(model, nn.Sequential):
            nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        elif "gamma" in key:
            nn.init.ones_(parameter)
    return model.train("dropped" in name), {next(iter(inspect.signature(model.forward).parameters)): x}
