"""Members and variables that are easily used for one another, such as `r.params.cos[1]` and `r.params.sin[1]`.

Wherever a source uses a name of a line, a mutant uses the next name of that line instead, and the first for the last.
A line may begin with words and a colon. Then only members of variables with these names are meant: in "p params: q k v"
those of `p` and `params`. If there is a colon but no words, the names are those of variables, not of members.
"""

NEIGHBOURS = [
    # RopeParams
    "cos[0] sin[0]",
    "cos[1] sin[1]",
    "cos[2] sin[2]",
    "cos[3] sin[3]",
    "cos[0] cos[1] cos[2] cos[3]",
    "sin[0] sin[1] sin[2] sin[3]",
    "positions[0] positions[1]",
    "slots[0] slots[1]",
    "positions[0] slots[0]",
    "positions[1] slots[1]",
    "p params: q k v",
    "batch seq",
    "p params: head_dim rotary_dim",
    "blocks block_size",
    "q_norm_weight k_norm_weight",
    "factor_hi factor_lo",
    "p params: has_positions has_slots",
    "interleaved inverse",
    # Operand
    "in[0] out[0]",
    "in[1] out[1]",
    "in[2] out[2]",
    "in[3] out[3]",
    "in[0] in[1] in[2] in[3]",
    "out[0] out[1] out[2] out[3]",
    "o q k v: in out",
    # RotateArgs
    "q_in k_in",
    "q_out k_out",
    "r a rotate: v_in k_in",
    "r a rotate: v_out k_out",
    "cos sin",
    "r a: positions slots",
    "wide_positions wide_slots",
    "q_norm_dtype k_norm_dtype",
    "r a rotate: x_dtype table_dtype inv_freq_dtype x_dtype",
    # NormBackwardArgs, TableBackwardArgs and TokensOfRows
    "n b t: q k",
    "q_norm_weight_grad k_norm_weight_grad",
    "cos_grad sin_grad",
    "order starts",
    "t tokens: copies entries",
    # CosSinParams
    "p params: axes tokens pairs axes",
    "inv_freq[0] inv_freq[1] inv_freq[2]",
]
