"""The norms and the attention processors of diffusers that fuse.py knows, by the text of what they compute.

tests/known/processors.py prints the entries of the release that is installed.
"""

from typing import NamedTuple


class Norm(NamedTuple):
    """How an RMS norm computes."""

    eps: str  # its attribute
    offset: float = 0.0  # what is added to the weight
    rounds: bool = False  # whether the normalised x is rounded to the dtype of x before the weight multiplies it


# By the text of forward.
NORMS = {
    "0f037e558f23": Norm("eps"),  # torch.nn.RMSNorm
    "96d732b42534": Norm("eps", rounds=True),  # RMSNorm: 0.38 to 0.40
    "0a4b56dbdf08": Norm("eps", rounds=True),  # RMSNorm: 0.41, 0.42
}

# The fused form of a processor and its arguments, by the text of __call__ without those of its rotary function and of
# dispatch_attention_fn.
PROCESSORS: dict[str, tuple[str, dict[str, bool]]] = {
    "c99f3343901e": ("flux", {}),  # Flux: 0.38, 0.39; BriaFibo
    "e614223c7f6a": ("flux", {}),  # Flux: 0.40 to 0.42
    "593e7db7a207": ("flux", {}),  # Flux2: 0.38, 0.39
    "52353f9f09c0": ("flux", {}),  # Flux2: 0.40 to 0.42
    "94e8d7ca0cd0": ("flux", {"contiguous": False}),  # Bria, LongCatImage, OvisImage
    "166596a36de5": ("flux2_parallel", {}),  # Flux2ParallelSelf: 0.38, 0.39
    "e688e6592f32": ("flux2_parallel", {}),  # 0.40 to 0.42
    "0b68ea84e446": ("qwen", {}),  # QwenDoubleStream: 0.39
    "85b72ca26839": ("qwen", {}),  # 0.42
    "c341bedadcc7": ("hunyuan", {}),  # HunyuanVideo, HunyuanImage
    "63b071ea22e0": ("hunyuan", {}),  # MotifVideo: 0.39 to 0.42
    "d3792bd4ce4c": ("hunyuan", {"by_pair": True}),  # HunyuanVideo15
    "97fb76cc78e7": ("z_image", {}),  # ZSingleStream
    "0cad12f856d0": ("z_image", {}),  # BriaFibo2: 0.42
    "fe9a7758f819": ("wan", {}),  # Wan, ChronoEdit, WanAnimate
    "f541556fed60": ("wan", {}),  # SkyReelsV2
}
