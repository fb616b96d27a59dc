"""The rotary functions of diffusers that are known, by their texts, see _text.py.

``make known`` makes this table from the releases that it names.
"""

from .._bits import Rounds
from .._conventions import Known

FUNCTIONS = {
    "2e1a9448b6cd": Known(
        "wan",
        Rounds(result="x"),
        name="apply_rotary_emb",
        files="chronoedit sana_video skyreels_v2 wan wan_animate",
        releases="0.42",
    ),
    "beae8850f682": Known(
        "qwen_image",
        {
            "a, a, b, b": Rounds(inside="float", result="x", contiguous=False),
            "a, b, a, b": Rounds(inside="float", result="x", contiguous=False),
            "complex numbers": Rounds(result="x", converts="once"),
        },
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="_apply_rotary_emb_nucleus",
        files="nucleusmoe_image qwenimage qwenimage21",
        releases="0.42",
    ),
    "adf49b234c50": Known(
        "stable_audio3",
        Rounds(result="x", converts="once"),
        partial=True,
        dense=True,
        name="_apply_rotary_partial",
        files="autoencoder_same stable_audio3",
        releases="0.42",
    ),
    "a5c9ec46b07d": Known(
        "z_image",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="apply_rotary_emb",
        files="controlnet_z_image z_image",
        releases="0.42",
    ),
    "496f39b1f338": Known(
        "prx",
        Rounds(inside="float32", result="x", converts="once"),
        dense=True,
        name="apply_rotary",
        files="kandinsky6 kandinsky6_sr",
        releases="0.42",
    ),
    "68844e486489": Known(
        "ltx",
        Rounds(inside="float", result="x", contiguous=False),
        name="apply_rotary_emb",
        files="ltx ltx2 sana_wm_refiner",
        releases="0.42",
    ),
    "bae43fa986f3": Known(
        "anima", Rounds(), name="_apply_rotary_pos_emb", files="condition_embedder_anima", releases="0.42"
    ),
    "4d59bae05b7c": Known(
        "ltx2",
        Rounds(inside="float", result="x", converts="float32", rounds_first_product=True),
        but="with contiguous results, with other bits of gradients for bfloat16 with tables of float64 and float16 with tables of float64",
        name="apply_split_rotary_emb",
        files="ltx2 sana_wm_refiner",
        releases="0.42",
    ),
    "594c55df2263": Known(
        "mochi",
        Rounds(inside="float", result="x", converts="float32"),
        dense=True,
        but="with other bits of gradients for bfloat16 with tables of float64 and float16 with tables of float64",
        name="apply_rotary_emb",
        files="attention_processor",
        releases="0.42",
    ),
    "402bb020122a": Known(
        "joyimage_edit",
        Rounds(inside="float", result="x"),
        name="_apply_rotary_emb_batched",
        files="joyimage_edit_plus",
        releases="0.42",
    ),
    "0db8309c0ea5": Known(
        "longcat",
        Rounds(inside="float", result="x"),
        name="_apply_rotary_emb",
        files="longcat_audio_dit",
        releases="0.42",
    ),
    "ea2cf2630829": Known(
        "minimax_music",
        Rounds(inside="x"),
        partial=True,
        dense=True,
        name="_apply_partial_rotary_emb",
        files="minimax_music3",
        releases="0.42",
    ),
    "25ce21a58edd": Known(
        "hidream",
        Rounds(inside="float", result="x", converts="once"),
        name="apply_rope",
        files="hidream_image",
        releases="0.42",
    ),
    "cd9e77f9f72f": Known(
        "wan_animate2",
        Rounds(inside="float64", result="float32", converts="once"),
        dense=True,
        name="rope_apply",
        files="wan_animate_2",
        releases="0.42",
    ),
    "c37d4fb1e65c": Known(
        "ernie",
        Rounds(inside="x"),
        partial=True,
        dense=True,
        name="apply_rotary_emb",
        files="ernie_image",
        releases="0.42",
    ),
    "369ac15ecfbc": Known(
        "allegro",
        Rounds(inside="float", result="x", contiguous=False),
        name="apply_1d_rope",
        files="embeddings",
        releases="0.42",
    ),
    "3e2cd96b205d": Known(
        "minimax_h3",
        Rounds(inside="x"),
        partial=True,
        dense=True,
        name="_apply_rotary_emb",
        files="minimax_h3",
        releases="0.42",
    ),
    "d47a6d3494ee": Known(
        "flux",
        {
            "a, a, b, b": Rounds(inside="float", result="x", contiguous=False),
            "a, b, a, b": Rounds(inside="float", result="x", contiguous=False),
            "complex numbers": Rounds(result="x", converts="once"),
        },
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="apply_rotary_emb",
        files="embeddings",
        releases="0.42",
    ),
    "debc1826b8a3": Known(
        "z_image",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="apply_rotary_emb",
        files="bria_fibo2",
        releases="0.42",
    ),
    "14f509814ab9": Known(
        "prx",
        Rounds(inside="float", result="bfloat16", converts="once"),
        dense=True,
        name="apply_rotary",
        files="kandinsky",
        releases="0.42",
    ),
    "f375a517eb1c": Known(
        "joyimage", Rounds(inside="float", result="x"), name="_apply_rotary_emb", files="joyimage", releases="0.42"
    ),
    "6669f87c113d": Known(
        "sana_wm",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="_apply_rotary_emb",
        files="sana_wm",
        releases="0.42",
    ),
    "225d6b9baa76": Known(
        "helios", Rounds(result="x"), name="apply_rotary_emb_transposed", files="helios", releases="0.42"
    ),
    "63a500c815a6": Known(
        "prx", Rounds(inside="float32", result="x", converts="once"), name="apply_rope", files="prx", releases="0.42"
    ),
}
# Why torch_rope does not support these.
UNSUPPORTED = {}
