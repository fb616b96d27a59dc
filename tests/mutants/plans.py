"""Mistakes in what the plans of all GPUs share, planted in each of them."""

PLAN = "csrc/plan.h"

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
    ("what passes through the norm not copied", PLAN, "return «p.has_norm» ||", "false"),
    ("values in place not copied", PLAN, "p.has_norm || «p.v.heads» ||", "false"),
    ("positions of a table without a range", PLAN, "return {«table» || at_place,", "false"),
    ("positions of a cache without a range", PLAN, "return {table || «at_place»,", "false"),
    ("the last row of a table refused", PLAN, "table ? «p.rows - 1» : INT64_MAX", "p.rows - 2"),
    ("one row past a table", PLAN, "table ? «p.rows - 1» : INT64_MAX", "p.rows"),
    ("one place past a block", PLAN, "at_place ? «p.block_size - 1» : INT64_MAX", "p.block_size"),
    ("the last place of a block refused", PLAN, "at_place ? «p.block_size - 1» : INT64_MAX", "p.block_size - 2"),
    ("the wider range of a table and a cache", PLAN, "std::min(«table ? p.rows - 1 : INT64_MAX», at_place ? p.block_size - 1 : INT64_MAX)", "at_place ? p.block_size - 1 : table ? p.rows - 1 : INT64_MAX"),
    ("a power of two below", PLAN, "while («power < n») power *= 2;", "power * 2 <= n"),
    ("a division rounded down", PLAN, "return «(a + b - 1) / b»;", "std::max<rope_int>(a / b, a > 0)"),
]  # fmt: skip
