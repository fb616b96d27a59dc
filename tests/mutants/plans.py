"""Mistakes in what all GPUs share and the CPU does not, planted in each of them."""

PLAN, CALL = "csrc/plan.h", "csrc/call.cpp"

MUTANTS = [
    ("starts that are not aligned", PLAN, "if («start % unsigned(bytes)» || strides", "false"),
    ("strided channels taken for aligned", PLAN, "unsigned(bytes)« || strides[dims - 1] != 1») return false", " || false"),
    ("strides that are not aligned", PLAN, "if («sizes[d] > 1 && strides[d] * itemsize % bytes») return false;", "false"),
    ("the stride of one sequence looked at", PLAN, "if («sizes[d] > 1» && strides", "true"),
    ("the stride of heads not looked at for alignment", PLAN, "for (int d = 0; d < «dims - 1»; d++)", "dims - 2"),
    ("offsets without those of channels", PLAN, "for (int d = 0; «d < dims»; d++) offset", "d < dims - 1"),
    ("offsets of sizes instead of last elements", PLAN, "std::max<rope_int>(«sizes[d] - 1», 0)", "sizes[d]"),
    ("vectors across the middle of a head", PLAN, "return «p.rotary_dim / 2 % vector == 0» && p.head_dim", "true"),
    ("vectors past the head", PLAN, "&& «p.head_dim % vector == 0»;", "true"),
    ("a part of what passes through not copied", PLAN, "(copies ? «ceil_div(p.head_dim - p.rotary_dim, 2 * vector)» : 0)", "(p.head_dim - p.rotary_dim) / (2 * vector)"),
    ("what passes through copied in one vector", PLAN, "ceil_div(p.head_dim - p.rotary_dim, «2 * vector»)", "4 * vector"),
    ("what q passes through not copied", PLAN, "|| «!q_in_place» ||", "false"),
    ("what k passes through not copied", PLAN, "|| «(p.k.heads && !k_in_place)»;", "false"),
    ("positions of a table without a range", PLAN, "return {«table» || at_place,", "false"),
    ("positions of a cache without a range", PLAN, "return {table || «at_place»,", "false"),
    ("the last row of a table refused", PLAN, "table ? «p.rows - 1» : INT64_MAX", "p.rows - 2"),
    ("one row past a table", PLAN, "table ? «p.rows - 1» : INT64_MAX", "p.rows"),
    ("one place past a block", PLAN, "at_place ? «p.block_size - 1» : INT64_MAX", "p.block_size"),
    ("the last place of a block refused", PLAN, "at_place ? «p.block_size - 1» : INT64_MAX", "p.block_size - 2"),
    ("the wider range of a table and a cache", PLAN, "std::min(«table ? p.rows - 1 : INT64_MAX», at_place ? p.block_size - 1 : INT64_MAX)", "at_place ? p.block_size - 1 : table ? p.rows - 1 : INT64_MAX"),
    ("a power of two below", PLAN, "while («power < n») power *= 2;", "power * 2 <= n"),
    ("positions outside not moved", CALL, "reshape(-1)«.clamp(-1 - offset, last)».add", ""),
    ("one axis for all frequencies", CALL, "p.inv_freq[0] = «inv_freq.stride(0)»;", "0"),
    ("strided frequencies read densely", CALL, "p.inv_freq[1] = «inv_freq.stride(1)»;", "1"),
    ("a division rounded down", PLAN, "return «(a + b - 1) / b»;", "std::max<rope_int>(a / b, a > 0)"),
]  # fmt: skip
