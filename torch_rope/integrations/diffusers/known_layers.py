"""The norms and the attention processors of diffusers that fuse.py knows, by the text of what they compute.

tests/known/processors.py prints the entries of the release that is installed.
"""

from .._fuse import Norm

# By the text of forward.
NORMS = {
    "0f037e558f23": Norm("eps"),  # RMSNorm of torch
    "96d732b42534": Norm("eps", rounds=True),  # RMSNorm: 0.38 to 0.40
    "0a4b56dbdf08": Norm("eps", rounds=True),  # RMSNorm: 0.41, 0.42
}

# The function of fuse.py that computes what a processor computes, and its arguments, by the text of __call__ without those
# of its rotary function and of dispatch_attention_fn. Where no release is named, the text is that of 0.38 to 0.42.
PROCESSORS: dict[str, tuple[str, dict[str, bool]]] = {
    "c99f3343901e": ("flux", {}),  # BriaFiboAttnProcessor; FluxAttnProcessor: 0.38, 0.39
    "e614223c7f6a": ("flux", {}),  # FluxAttnProcessor, also of Chroma: 0.40 to 0.42
    "593e7db7a207": ("flux", {}),  # Flux2AttnProcessor: 0.38, 0.39
    "52353f9f09c0": ("flux", {}),  # Flux2AttnProcessor: 0.40 to 0.42
    "94e8d7ca0cd0": ("flux", {"contiguous": False}),  # the AttnProcessors of Bria, LongCatImage, OvisImage
    "166596a36de5": ("flux2_parallel", {}),  # Flux2ParallelSelfAttnProcessor: 0.38, 0.39
    "e688e6592f32": ("flux2_parallel", {}),  # Flux2ParallelSelfAttnProcessor: 0.40 to 0.42
    "0b68ea84e446": ("qwen", {}),  # QwenDoubleStreamAttnProcessor2_0: 0.39
    "85b72ca26839": ("qwen", {}),  # QwenDoubleStreamAttnProcessor2_0: 0.42
    "c341bedadcc7": ("hunyuan", {}),  # HunyuanVideoAttnProcessor2_0, HunyuanImageAttnProcessor
    "63b071ea22e0": ("hunyuan", {}),  # MotifVideoAttnProcessor2_0: 0.39 to 0.42
    "d3792bd4ce4c": ("hunyuan", {"by_pair": True}),  # HunyuanVideo15AttnProcessor2_0
    "97fb76cc78e7": ("z_image", {}),  # ZSingleStreamAttnProcessor
    "0cad12f856d0": ("z_image", {}),  # BriaFibo2AttnProcessor: 0.42
    "fe9a7758f819": ("wan", {}),  # WanAttnProcessor, also of ChronoEdit and WanAnimate
    "f541556fed60": ("wan", {}),  # SkyReelsV2AttnProcessor
}
