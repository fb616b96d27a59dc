"""Members that one may read for another. Every place that reads a member of a line is planted to read the next one of the
line: `r.params.cos[1]` as `r.params.sin[1]`. Where a line begins with names and a colon, those are what
the member is of; none: it is no member."""

NEIGHBOURS = [
    # RopeParams
    "cos[0] sin[0]",
    "cos[1] sin[1]",
    "cos[2] sin[2]",
    "cos[0] cos[1] cos[2]",
    "sin[0] sin[1] sin[2]",
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
    "inv_freq[0] inv_freq[1]",
]
