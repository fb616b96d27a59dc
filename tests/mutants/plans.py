"""Mistakes in the code that only the GPU back ends share. They are planted in each of those back ends."""

PLAN, CALL = "csrc/plan.h", "csrc/call.cpp"

MUTANTS = [
    ("starts that are not aligned are taken for aligned", PLAN, "if («start % unsigned(bytes)» || strides", "false"),
    ("strided channels are taken for aligned", PLAN, "unsigned(bytes)« || strides[dims - 1] != 1») return false", " || false"),
    ("strides that are not aligned are taken for aligned", PLAN, "if («sizes[d] > 1 && strides[d] * itemsize % bytes») return false;", "false"),
    ("the stride of a dimension of one element is checked", PLAN, "if («sizes[d] > 1» && strides", "true"),
    ("the stride of heads is not checked for alignment", PLAN, "for (int d = 0; d < «dims - 1»; d++)", "dims - 2"),
    ("the last element offset leaves out channels", PLAN, "for (int d = 0; «d < dims»; d++) offset", "d < dims - 1"),
    ("the last element offset is one step too far", PLAN, "std::max<rope_int>(«sizes[d] - 1», 0)", "sizes[d]"),
    ("vectors across the first rotated channel are allowed", PLAN, "return «p.rotary_start % vector == 0» &&", "true"),
    ("vectors across the middle of a head are allowed", PLAN, "&& «p.rotary_dim / 2 % vector == 0» && p.head_dim", "true"),
    ("vectors past the head are allowed", PLAN, "&& «p.head_dim % vector == 0»;", "true"),
    ("the last channels past rotary_dim are not copied", PLAN, "(copies ? «ceil_div(p.head_dim - p.rotary_dim, 2 * vector)» : 0)", "(p.head_dim - p.rotary_dim) / (2 * vector)"),
    ("half of the channels past rotary_dim are not copied", PLAN, "ceil_div(p.head_dim - p.rotary_dim, «2 * vector»)", "4 * vector"),
    ("the channels of q past rotary_dim are not copied", PLAN, "|| «!q_in_place» ||", "false"),
    ("the channels of k past rotary_dim are not copied", PLAN, "|| «((p.k.heads || p.v.heads) && !k_in_place)»;", "false"),
    ("v is not copied if k has no heads", PLAN, "((«p.k.heads || p.v.heads») &&", "p.k.heads"),
    ("positions of a table have no range", PLAN, "return {«table» || cache_by_position,", "false"),
    ("positions of a cache have no range", PLAN, "return {table || «cache_by_position»,", "false"),
    ("the last row of a table is refused", PLAN, "table ? «p.table_rows - 1» : INT64_MAX", "p.table_rows - 2"),
    ("one row past a table is allowed", PLAN, "table ? «p.table_rows - 1» : INT64_MAX", "p.table_rows"),
    ("one cell past a block is allowed", PLAN, "cache_by_position ? «p.block_size - 1» : INT64_MAX", "p.block_size"),
    ("the last cell of a block is refused", PLAN, "cache_by_position ? «p.block_size - 1» : INT64_MAX", "p.block_size - 2"),
    ("the cache alone limits positions that also select table rows", PLAN, "std::min(«table ? p.table_rows - 1 : INT64_MAX», cache_by_position ? p.block_size - 1 : INT64_MAX)", "cache_by_position ? p.block_size - 1 : table ? p.table_rows - 1 : INT64_MAX"),
    ("a power of two is rounded down", PLAN, "while («power < n») power *= 2;", "power * 2 <= n"),
    ("positions far outside the table are not moved next to it", CALL, "reshape(-1)«.clamp(-1 - offset, last)».add", ""),
    ("the first part of a frequency is added twice", CALL, "strides[0] = split ? «inv_freq.stride(0)» : 0;", "0"),
    ("strided frequencies are read as if adjacent", CALL, "strides[d] = «inv_freq.stride(d - !split)»;", "1"),
    ("a division is rounded down", PLAN, "return «(a + b - 1) / b»;", "std::max<rope_int>(a / b, a > 0)"),
]  # fmt: skip
