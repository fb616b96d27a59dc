"""The rotary functions of timm that are known, by their texts, see _text.py.

``make known`` makes this table from the releases that it names.
"""

from ._bits import Rounds
from ._reading import Known

FUNCTIONS = {
    "2f18dc9ec618": Known(
        "timm", Rounds(result="x"), name="apply_rot_embed_list", files="pos_embed_sincos", releases="1.0"
    ),
    "b452f9d14bb3": Known(
        "timm, one table", Rounds(result="x"), name="apply_rot_embed_cat", files="pos_embed_sincos", releases="1.0"
    ),
    "d79b435510c2": Known("timm", Rounds(result="x"), name="apply_rot_embed", files="pos_embed_sincos", releases="1.0"),
}
# Why torch_rope does not support these.
UNSUPPORTED: dict[str, str] = {}
