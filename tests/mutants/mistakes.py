"""The mistakes that `make mutate` plants.

NEIGHBOURS generates mistakes: members and variables that are easily used for one another, such as `r.params.cos[1]` and
`r.params.sin[1]`. Wherever a source uses a name of a line, a mistake uses the next name of that line instead, and the first
for the last. A line may begin with words and a colon. Then only members of variables with these names are meant: in
"p params: q k v" those of `p` and `params`. If there is a colon but no words, the names are those of variables.

A written mistake is (its effect, the file, text of the file with «» around the replaced part, the replacement), where both
are whole expressions or statements; one in the Python package names the test file that must fail, too.
"""

from dataclasses import dataclass, field

import plant

NEIGHBOURS = [
    "cos_strides sin_strides",
    "in_strides out_strides before_strides",
    "position_strides slot_strides",
    *(f"{name}_strides[0] {name}_strides[1]" for name in ("position", "slot", "weight")),
    "inv_freq_strides[0] inv_freq_strides[1] inv_freq_strides[2]",
    "sides[kQ] sides[kK] sides[kV]",
    "batch seq",
    "blocks block_size",
    "factor_hi factor_lo",
    "a p: has_positions has_slots",
    "interleaved inverse",
    "side: in out",
    "cos sin",
    "r a: positions slots",
    "wide_positions wide_slots",
    "r a rotate: x_dtype table_dtype inv_freq_dtype x_dtype",
    "c p: axes tokens pairs axes",
]


@dataclass
class Build:
    """A copy of the tree that contains all mistakes of some files."""

    tests: list[str]  # the quick ones first
    command: list[str]  # builds the copy
    neighbours_in: list[str]  # the files in which names are exchanged
    neighbours: list[str]  # more lines like those of NEIGHBOURS
    written: list[tuple[str, str, str, str]]
    options: list[str] = field(default_factory=list)  # for pytest
    # Changes to the copy: file, regular expression, replacement.
    edits: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.neighbours_in + [file for _, file, *_ in self.written]))


EMULATOR, SIMULATOR = "tests/backends/cuda/emulator/emulator.py", "tests/backends/metal/simulator/simulator.py"

# ---- the written mistakes ----

WRITTEN_CPU = [
    ("two tokens may have one cell", "csrc/cpu/cpu.cpp", "TORCH_CHECK_INDEX(«is_new», call.op", "true"),
    ("a call of pads alone is out of range", "csrc/cpu/cpu.cpp", "limited && «low <= high»", "true"),
    ("strided frequencies are read as if adjacent", "csrc/cpu/cpu.cpp", "wide.sum(0) : «wide.contiguous()»;", "wide"),
    ("strided frequencies are read as if adjacent", "csrc/cpu/tiles.inc", "const int64_t at = «i * a.inv_freq_strides[1]»;", "i"),
    ("float64 arithmetic takes the float32 attention_factor", "csrc/cpu/angles.inc", "hi = wide ? «A(args.attention_factor)»", "A(args.factor_hi)"),
    ("each row of a table by head rotates the gradients of all heads of a norm", "csrc/cpu/norm_backward.inc", "const bool one = «one_head_at_a_time(a)»;", "false"),
    ("only the first head is rotated", "csrc/cpu/tiles.inc", "inner = outside ? tokens : «heads»;\n    const int64_t next", "Range{heads.begin, heads.begin + 1}"),
    ("every copy is one of the first token or head", "csrc/cpu/tiles.inc", "static_cast<const T*>(side.in) + «i * strides[outside ? 2 : 1]» +", "0"),
    ("every sequence is read where the first one is", "csrc/cpu/rotate.inc", "static_cast<const T*>(side.in) + «tile.b * side.in_strides[0]» +", "0"),
    ("all heads have the scale of the first one", "csrc/cpu/rotate.inc", "Out(out, side.scale + «h * side.scale_stride»)", "0"),
    ("sin has the wrong sign in interleaved bfloat16", "csrc/cpu/head.inc", "rotate(x2.even, x2.odd, c, «-s»)", "s"),
    ("the common term of a norm's gradient has the wrong sign", "csrc/cpu/norm_backward.inc", "const A common = «-(scale * scale * ((heads == 1 ? products : A(all_products)) / A(heads * n)))»;", "(scale * scale * ((heads == 1 ? products : A(all_products)) / A(heads * n)))"),
    ("a quantised float64 is rounded twice", "csrc/cpu/head.inc", "quantised(«rounded_to_odd(number / A(divisor.given))», O())", "float(number / A(divisor.given))"),
    ("the rest of a shared frequency is ignored", "csrc/cuda/angles.cuh", "turns_per_position(hi, «lo», hi, lo)", "0.0f"),
    ("all tokens of a thread block have the angles of the first", "csrc/cuda/usual.cuh", "first = «int(threadIdx.z) * pairs»", "0"),
    ("shared angles are read before all are there", "csrc/cuda/usual.cuh", "«__syncthreads()»;\n    read_columns", "void()"),
    ("shared angles are not inverse", "csrc/cuda/usual.cuh", "K::plain && a.inverse ? «-angle.sin[0]» :", "angle.sin[0]"),
    ("each share begins with the first head", "csrc/cuda/usual.cu", "int head = «share.head» * a.steps", "0"),
    ("a table with a factor is taken for usual", "csrc/cuda/rotate_plan.h", "|| («has_factor && !frequencies»)", "false"),
    ("a quotient is not corrected by its remainder", "csrc/cpu/head.inc", "return «fma(-fma(near, Floats(scale), -magnitude), Floats(inverse), near)»;", "near"),
    ("scattered heads are written with wrong steps", "csrc/cpu/tiles.inc", "y_inner = channels_outside ? «y_head» : y_channel", "y_channel"),
    ("more dimensions than the most are accepted", "csrc/checks.cpp", "least <= t->dim() && «t->dim() <= most»", "true"),
    ("k may have another batch than q", "csrc/checks.cpp", "  if (q->dim() == 4) check_same(call, kBatchAxis, k, q, may_differ);\n", ""),
    ("float16 tables are accepted with any dtype", "csrc/checks.cpp", "ROPE_CHECK_TYPE(«is_parameter(call, *cos)», \"cos and sin are", "is_parameter(call, *cos) || cos->scalar_type() == at::kHalf"),
    ("positions may have any dtype", "csrc/checks.cpp", "check_type(call, «t->scalar_type() == at::kInt || t->scalar_type() == at::kLong», t,", "true"),
    ("positions choose no cells if tables are by token", "csrc/checks.cpp", "if («!call.has_cache() || call.slots») {", "true"),
    ("the offset chooses no cell", "csrc/cpu/tiles.inc", "«token_of(a, b, s + j).position» * strides[1]", "(token_of(a, b, s + j).position - a.offset)"),
    ("a cache may have another head_dim than its tensor", "csrc/checks.cpp", "    check_same(call, kHeadDimAxis, to, x);\n", ""),
    ("parameters are not checked for None, nor for their device", "csrc/checks.cpp", "    add(t, Used::kParameter, false);\n", ""),
    ("a message names one tensor twice", "csrc/checks.cpp", "ROPE_CHECK_VALUE(false, «a.name», \" overlaps \", b.name,", "b.name"),
    ("operators that return new tensors are checked for overlap", "csrc/checks.cpp", "if («in_place») check_overlap", "true"),
    ("negative positions are accepted", "csrc/checks.cpp", "!overflow && «first >= 0» && last <= highest", "true"),
    ("a quantised cache needs no scale", "csrc/checks.cpp", "ROPE_CHECK_VALUE(«scale.tensor || type == x_type»", "true"),
    ("v is not copied if q has no channels", "csrc/args.h", "has_channels || («side.heads && side.head_dim»)", "a.sides[kQ].heads && a.sides[kQ].head_dim"),
    ("gradients of weights are not set to zero if there are no tokens", "csrc/backend.h", "    for (int i = kQ; i <= kK && is_empty(a); i++) call.sides[i].weight_grad->zero_();\n", ""),
    ("dimensions that overlap are taken for nested", "csrc/overlap.cpp", "nested = nested && «within <= step(d)»;", "true"),
    ("tensors in different storages are compared by storage offset alone", "csrc/overlap.h", "-apart < length_ && «storage_ == other.storage_»", "true"),
    ("tensors with the same first element are taken for the same", "csrc/overlap.cpp", "if («sizes_[d] != other.sizes_[d] || (sizes_[d] > 1 && strides_[d] != other.strides_[d])») return false;", "false"),
    ("q is taken for written although there is a q_out", "csrc/operators.cpp", "return written_[number] && «!(number == 0 && q_out_ && is_given(values[*q_out_]))»;", "true"),
    ("a NaN becomes the largest float8", "csrc/quantise.h", "return «given > 0x7f800000 ? zero + 0x7f : code»;", "code"),
    ("the first part of a frequency is added twice", "csrc/call.cpp", "strides[0] = split ? «inv_freq.stride(0)» : 0;", "0"),
    ("tables by head are read by token", "csrc/call.cpp", "a.source = cos->dim() == 2 ? kTableByPosition : «cos->dim() == 3 ? kTableByToken : kTableByHead»;", "kTableByToken"),
    ("int32 positions are read as int64", "csrc/call.cpp", "a.wide_positions = «positions->scalar_type() == at::kLong»;", "true"),
    ("a scale of one element is read for each head", "csrc/call.cpp", "side.scale_stride = «t.scale->numel() == 1» ? 0", "false"),
    ("messages call x q", "csrc/call.h", "return «sides[kK].in ? \"q\" : \"x\"»;", "\"q\""),
    ("the norm's backward does not check shapes of gradients", "csrc/checks.cpp", "  if (call.is_backward()) check_gradients(call);\n", ""),
    ("a sparse tensor is not named", "csrc/devices.cpp", "TORCH_CHECK_NOT_IMPLEMENTED(«t.layout() == at::kStrided» && ", "true"),
    ("tangents of tensors with less than three dimensions are not noticed", "csrc/autograd.cpp", "(recording ? varies(value.toTensor()) : «has_tangent(value.toTensor())»)", "value.toTensor().dim() > 2 && has_tangent(value.toTensor())"),
    ("gradients are computed that are not needed", "csrc/autograd.cpp", "&& «ctx->needs_input_grad(size_t(at - numbers.begin()))»;", "true"),
    ("a rotation does not notice a learned sin", "csrc/autograd.cpp", "of_angles = any({kCos, «kSin», kInvFreq}),", "kCos"),
    ("the tangent of a weight's gradient lacks r", "csrc/definition.cpp", "(«h * x * r»).sum(tokens)", "h * x"),
    ("the definition ignores inverse", "csrc/definition.cpp", "if («call.inverse != call.is_backward()») sin = -sin;", "false"),
    ("the definition rotates one channel of a pair the other way", "csrc/definition.cpp", "at::stack({«a * cos - b * sin», b", "a * cos + b * sin"),
    ("the definition scales only cos by attention_factor", "csrc/definition.cpp", "sin = «sin * call.attention_factor»;", "sin"),
    ("the definition writes pads to the last block", "csrc/definition.cpp", "const Tensor kept = («block >= 0»).nonzero()", "block == block"),
    ("the definition ignores a scale", "csrc/definition.cpp", "const Tensor quotient = «widened(x) / (scale->numel() == 1 ? scale->reshape({}) : scale->unsqueeze(-1))»;", "widened(x)"),
    ("the definition cuts an int8 instead of rounding it", "csrc/definition.cpp", "return «quotient.nan_to_num(0).clamp(-128, 127).round()».to(at::kChar);", "quotient.nan_to_num(0).clamp(-128, 127)"),
    ("derivatives are computed in the dtype of the tables", "csrc/autograd.cpp", "return c10::promoteTypes(«type», dtype.value_or(at::kFloat));", "dtype.value_or(at::kFloat)"),
    ("inference tensors are written outside inference_mode", "csrc/in_place.cpp", "TORCH_CHECK(«inference || !t.is_inference()», op.name", "true"),
    ("copies are not quantised", "csrc/cpu/rotate.inc", "if («made != side.format») add(", "false"),
    ("weights have no offset", "csrc/cpu/rotate.inc", "row[d] += «A(a.weight_offset)»;", "A(0)"),
    ("a norm is not rounded before the rotation", "csrc/cpu/rotate.inc", "const bool apart = «a.rounding != kOnce && i != kV»,", "false"),
    ("a norm is not rounded before its weight", "csrc/cpu/head.inc", "return («rounds_first» ? rounded<T>(x * scale)", "false"),
    ("all tokens have the factor of the first", "csrc/cpu/rotate.inc", "side.factor[«token * side.factor_strides[1]» +", "0"),
    ("all sequences have the factors of the first", "csrc/cpu/rotate.inc", "side.factor += «tile.b * side.factor_strides[0]» +", "0"),
    ("the gradient of q lacks the factor", "csrc/cpu/norm_backward.inc", "if («side.factor»)", "static_cast<const float*>(nullptr)"),
    ("v's weights are packed as those of q", "csrc/cpu/rotate.inc", "const bool rotates = «i != kV && a.rounding == kOnce»;", "a.rounding == kOnce"),
    ("the definition adds no offset", "csrc/definition.cpp", "if («call.norm_weight_offset == 0») return widened(weight);", "true"),
    ("the definition does not round before the weight", "csrc/definition.cpp", "if («call.round_before_weight») x = widened", "false"),
    ("a factor by head is checked by token", "csrc/checks.cpp", "equal(size(*factor, «by_head ? -2 : -1»), seq)", "-1"),
    ("float32 weights may be rounded before", "csrc/checks.cpp", "check_type(call, «call.round_before_weight ? is_q_type : wide», w", "wide"),
    ("an eager backward multiplies after it rotates", "csrc/autograd.cpp", "if (factor && «call.eager_rounding») {", "false"),
    ("the derivatives of a norm are rounded eagerly", "csrc/autograd.cpp", "if («call.sides[kQ].weight») call.eager_rounding =", "static_cast<const Tensor*>(nullptr)"),
    ("the rest of the other axis is missing", "csrc/angle.h", "rest = «rest + more_rest + error»;", "rest + error"),
    ("the first product of an eager rotation is not rounded", "csrc/rotation.h", "return «round(own * cos)» +", "own * cos"),
    ("the exponents that are skipped are not counted", "csrc/quantise.h", " + «(exponent >> shift)») ^", "0 * exponent"),
]  # fmt: skip

WRITTEN_CUDA = [
    ("float16 is rounded twice", "csrc/cuda/vectors.cuh", "ROPE_FN void round_to(float x, __half& y) { y = __float2half_rn(«x»); }", "__bfloat162float(__float2bfloat16_rn(x))"),
    ("a pad must have an allowed position", "csrc/cuda/general.cuh", "check_token(«valid || pad», fits)", "valid"),
    ("a pad of a usual call must have an allowed position", "csrc/cuda/usual.cuh", "check_token(«valid || pad», fits)", "valid"),
    ("positions choose no cells", "csrc/token.h", "valid, false, true, b, «I(position)»};", "s"),
    ("many blocks are taken for one", "csrc/cuda/rotate_plan.h", "return «a.blocks <= 1» ||", "a.blocks >= 1"),
    ("the rest of a frequency is ignored", "csrc/cuda/angles.cuh", "turns_per_position(hi[i], «lo[i]», hi[i]", "0.0f"),
    ("the rest of a shared frequency is ignored", "csrc/cuda/angles.cuh", "turns_per_position(hi, «lo», hi, lo)", "0.0f"),
    ("all tokens of a thread block have the angles of the first", "csrc/cuda/usual.cuh", "first = «int(threadIdx.z) * pairs»", "0"),
    ("shared angles are read before all are there", "csrc/cuda/usual.cuh", "«__syncthreads()»;\n    read_columns", "void()"),
    ("shared angles are not inverse", "csrc/cuda/usual.cuh", "K::plain && a.inverse ? «-angle.sin[0]» :", "angle.sin[0]"),
    ("each share begins with the first head", "csrc/cuda/usual.cu", "int head = «share.head» * a.steps", "0"),
    ("a table with a factor is taken for usual", "csrc/cuda/rotate_plan.h", "|| («has_factor && !frequencies»)", "false"),
    ("a quotient is not corrected by its remainder", "csrc/cuda/quantise.cuh", "«fma(-fma(near, scale, -number), inverse, near)» : near", "near"),
    ("a tiny scale is not moved to moderate exponents", "csrc/cuda/quantise.cuh", "size < «0x1p-60f» ?", "0.0f"),
    ("steps of a rotation are not rounded to x's dtype", "csrc/cuda/general.cuh", "Eagerly<T>{«a.rounding == kEachNarrow»}.template rotate", "false"),
    ("steps of a usual rotation are not rounded to x's dtype", "csrc/cuda/rotate_plan.h", "u.narrow = «a.rounding == kEachNarrow»", "false"),
    ("rotated channels are copied for those after them", "csrc/chunk.h", "return channel < start ? channel : «channel + rotary_dim»;", "channel"),
    ("a first vector past the last channel is read", "csrc/cuda/vectors.cuh", "if («c.at[k] <= c.last») x.of[k] =", "true"),
    ("sin has the wrong sign", "csrc/cuda/vectors.cuh", "x = channel(own, y, cos, «-sin»);", "sin"),
    ("tokens without a cell are written", "csrc/cuda/general.cu", "(«to_cell && token.pad») ||", "false"),
    ("tokens of a usual call without a cell are written", "csrc/cuda/usual.cuh", "is_written = !(«to_cell && token.pad»)", "false"),
    ("only the first piece of a v is copied", "csrc/cuda/general.cu", "head / t.pieces, «head % t.pieces * a.sides[kQ].head_dim»};", "0"),
    ("a v of heads that are apart is cut", "csrc/plan.h", "v.heads == 1 || «strides[2] == v.head_dim»", "true"),
    ("a rounded number is not rounded before it is quantised", "csrc/cuda/general.cu", "if («a.rounding != kOnce») numbers", "false"),
    ("the last kernel does not wait for the parts", "csrc/cuda/norm_backward.cu", "«cudaGridDependencySynchronize()»;", "void()"),
    ("a mean of zero or infinity has no scale", "csrc/cuda/norm.cuh", "error = «fminf(fma(-mean_and_eps * root, root, 1.0f), 1e-6f)»;", "fma(-mean_and_eps * root, root, 1.0f)"),
    ("the weights of q are used for k", "csrc/cuda/usual.cu", "held_weights = {a, «side», chunk, 0}", "a.sides[kQ]"),
    ("all tokens of a part are taken for tokens of its first sequence", "csrc/cuda/norm_backward.cu", "while (s >= part.seq) s -= part.seq, «b++»;", "0"),
    ("weights of a general call have no offset", "csrc/cuda/general.cuh", "weight += «sizeof(A) == 8 ? A(a.weight_offset) : A(a.narrow_weight_offset)»;", "A(0)"),
    ("weights of a usual call have no offset", "csrc/cuda/rotate_plan.h", "s.weight_offset = «a.narrow_weight_offset»;", "0.0f"),
    ("a usual norm is not rounded before its weight", "csrc/cuda/usual.cuh", "if («K::eager && a.round_before_weight») round();", "false"),
    ("a norm is not rounded before the rotation", "csrc/cuda/general.cu", "if («a.rounding != kOnce») round();\n    }", "false"),
    ("weights past the end of v are read", "csrc/cuda/general.cuh", "from[«min(at + i % S::V, c.last)» * strides[1]]", "(at + i % S::V)"),
    ("the gradient of q lacks the factor", "csrc/cuda/norm_backward.cu", "if («!params.factor») return;", "true"),
    ("factors are not merged with their sequences", "csrc/plan.h", "    if (side.factor) strides[n++] = side.factor_strides;\n", ""),
    ("an offset of a group is forgotten", "csrc/cuda/rotate_plan.h", "{plan.by_block && «a.weight_offset != 0», \"a thread", "false"),
    ("the sums of two groups are mixed up", "csrc/cuda/norm.cuh", "of_warps[sums_before++ % «2»];", "1"),
    ("only the first head of a thread is in the sum", "csrc/cuda/usual.cu", "squares[0] += double(squares_of(«x», is_whole(chunk)));", "elements[0]"),
    ("a head past the last one of a group is written", "csrc/cuda/usual.cu", "int(threadIdx.x) < side.chunks && «head(j) < end»; }", "true"),
    ("all heads have cos and sin of the first", "csrc/cuda/usual.cuh", "int64_t(«head») * a.table_head_stride,", "0"),
    ("the weights of a group are those of its first head", "csrc/cuda/usual.cuh", "const int64_t at = int64_t(«head») * a.weight_stride", "0"),
    ("the gradients of the weights of a group are those of its last token", "csrc/cuda/norm_backward.cu", "sum_of(sums, head, i)) += «double(terms.of[i])»;", "double(terms.of[i]) - totals[j * 2 * V + i]"),
    ("a group that is too large is taken for usual", "csrc/cuda/rotate_plan.h", "|| «held > kHeldChannels»)", "false"),
    ("a team of parts is not summed", "csrc/cuda/norm_backward.cu", "for (int other = «1»; other < kSumTeams; other++)", "2"),
    ("the warps of a thread block are not summed", "csrc/cuda/norm.cuh", "sums[i] = «(lane & (team - 1)) < warps» ? these", "lane < 1"),
    ("the later heads of v are left out", "csrc/cuda/general.cu", "for (; «group < groups»; group", "group < starts[kV] + 1"),
    ("the position of the first axis is used for all", "csrc/cuda/cos_sin.cu", "position_at(c, «axis * c.tokens + row»)", "row"),
    ("no batch is merged", "csrc/plan.h", "if («p.batch == 1» || (p.has_cache", "true"),
    ("sequences that are apart are merged", "csrc/plan.h", "return «p.seq == 1 || s[0] == p.seq * s[1]»;", "true"),
    ("a v of another size is taken for usual", "csrc/cuda/rotate_plan.h", "{v.heads && «v.head_dim != q.head_dim», \"v has", "false"),
    ("tables that are not aligned are read as vectors", "csrc/cuda/tiling.h", "return is_aligned(«reinterpret_cast<uintptr_t>(data)», strides, several", "uintptr_t(0)"),
    ("many threads are idle", "csrc/cuda/rotate_plan.h", "while («y > 1 && 4 * sum_of(y) * y > 5 * heads») y", "false"),
    ("the last tokens are in no part", "csrc/cuda/norm_plan.h", "parts.count = «ceil_div(tokens, parts.tokens)»;", "std::max<rope_int>(1, tokens / parts.tokens)"),
    ("one row past a table is allowed", "csrc/args.h", "by_row ? «a.table_rows - 1» : INT64_MAX", "a.table_rows"),
    ("the first part of a frequency is added twice", "csrc/call.cpp", "strides[0] = split ? «inv_freq.stride(0)» : 0;", "0"),
]  # fmt: skip

WRITTEN_METAL = [
    ("the last element offset is one step too far", "csrc/mps/dispatch.h", "last += («t.size(d) - 1») * t.stride(d)", "t.size(d)"),
    ("every int64 position is read as int32", "shaders/tokens.h", "return «bytes == 8» ? static_cast<device const long*>", "false"),
    ("slots past the cache are valid", "csrc/token.h", "t.fits = «slot < cells»;", "true"),
    ("the offset chooses no cell", "csrc/token.h", "valid, false, true, b, «I(position)»};", "I(given)"),
    ("q goes into the cache", "shaders/heads.h", "const bool to_cache = k_tensors == kSides && «side != kQ»;", "true"),
    ("every head has the sines of the first", "shaders/angles.h", "row.sin + «head» * row.sin_head", "I(0)"),
    ("a quantised number is not rounded eagerly", "shaders/heads.h", "    if (k_rounding != kOnce) numbers = to<float>(x);\n", ""),
    ("numbers are multiplied by the scale", "shaders/heads.h", "quantised(«precise::divide(numbers.of[i], head.scale)», Int8())", "numbers.of[i] * head.scale"),
    ("a channel past the end of v is summed", "csrc/chunk.h", "{{c.at[0] + by, c.at[1] + by}, «last», c.rotated", "c.last + by"),
    ("there is too little threadgroup memory for the norm's backward", "csrc/mps/mps.mm", "NSUInteger(threads) * «8») * sizeof(float)", "4"),
    ("an exception stays in the queue", "csrc/mps/mps.mm", "  if (error) std::rethrow_exception(error);\n", ""),
    ("weights have no offset", "shaders/sums.h", "w.of[i] = w.of[i] + «r.args.narrow_weight_offset»;", "0.0f"),
    ("a norm is not rounded before its weight", "shaders/heads.h", "if («k_round_before_weight») n =", "false"),
    ("v's norm has no weight", "csrc/mps/dispatch.h", "c.weighted |= «(side.weight != nullptr) << i»;", "(side.weight != nullptr && i != kV) << i"),
    ("weights past the end of v are read", "shaders/sums.h", "channel = «min(channel_of(c, i), c.last)»;", "channel_of(c, i)"),
    ("all heads have the factor of the first", "shaders/heads.h", "of_token.factor[«index * of_token.factor_head»]", "I(0)"),
    ("the gradient of q lacks the factor", "shaders/norm_backward.metal", "if («has_factor(head.side)») c.gradient", "false"),
    ("channels that are not rotated have no factor in place", "shaders/heads.h", "has(k_normalised, side) || «has_factor(side)» || chunk.rotated", "false"),
    ("the weight is missing in a norm's gradient", "shaders/norm_backward.metal", "c.weighted = «product(c.gradient, weights)»;", "c.gradient"),
    ("the factors of the first head are used for all", "shaders/norm_backward.metal", "finish_backward(c, factors[2 * i], factors[«2 * i + 1»]", "1"),
    ("the sums are read before they are written", "csrc/mps/mps.mm", "          if (launch != &first) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];\n", ""),
    ("a kernel is compiled for another V", "csrc/mps/source.h", "if (vector) instance += \", \" + std::to_string(«vector»);", "vector == 8 ? 4 : vector"),
    ("the factors are read before they are written", "shaders/norm_backward.metal", "«    threadgroup_barrier(mem_flags::mem_threadgroup);\n»    for (uint index = walk_of_all.chunk", ""),
    ("the heads of a share are neighbours", "shaders/heads.h", "const uint h = share + step + «i * r.shares»;", "i"),
    ("v is rotated by the norm's kernel", "shaders/heads.h", "const bool rotates = chunk.rotated && «head.side != kV»;", "true"),
    ("a team takes only the first wide heads of its share", "shaders/norm.metal", "first < end; first += «kHeads * walk.head_step»)", "end"),
    ("only the first span of a normalised v is written", "shaders/norm.metal", "for (I begin = 0; begin < end; begin += «span») {\n      for (uint index = lane; index < chunks; index += lanes) {\n        const Chunk<V, I> chunk = moved(chunk_at<V, I>(r, index), begin, end - 1);\n        Numbers<V> weights", "end"),
    ("the mean over all heads is that of one head", "shaders/norm.metal", "«rope_int(end - start) * p.sides[side].head_dim», p", "p.sides[side].head_dim"),
    ("a pipeline is used for other function constants", "csrc/mps/mps.mm", "made().pipelines[{kernel, «constants»}]", "Constants{}"),
    ("wide heads are fewer with chunks of eight", "csrc/mps/dispatch.h", "chunks_of(p, four ? «4» : 1, true)", "8"),
    ("v is always in the list of heads", "csrc/mps/dispatch.h", "c.v_apart = v.heads && «v.head_dim != q.head_dim»;", "false"),
    ("what the sum over axes loses is dropped", "csrc/angle.h", "rest = «rest + more_rest + error»;", "rest + more_rest"),
    ("all axes use the frequencies of the first", "shaders/cos_sin.metal", "    freq += ulong(p.inv_freq_strides[1]);\n", ""),
    ("the stride of a dimension of one element is checked", "csrc/plan.h", "if («sizes[d] > 1» && strides", "true"),
    ("half of the channels past rotary_dim are not copied", "csrc/plan.h", "ceil_div(p.sides[kQ].head_dim - p.rotary_dim, «2 * vector»)", "4 * vector"),
    ("one cell past a block is allowed", "csrc/args.h", "by_cell ? «a.block_size - 1» : INT64_MAX", "a.block_size"),
]  # fmt: skip

# In the package: the file is in torch_rope/, the test in tests/.
PYTHON = [
    ("vmap: every sample is the first", "_register.py", "select(dim, i)", "select(dim, 0)", "pytorch/test_vmap"),
    ("vmap: results are written along the first dimension", "_register.py", "given[x].movedim(dims[x], 0).copy_(out)", "given[x].copy_(out)", "pytorch/test_vmap"),
    ("sharding: tables by position are taken for tables by token", "_signatures.py", "if name in (\"cos\", \"sin\") and dim == 2:", "if name in (\"cos\", \"sin\") and dim == 1:", "pytorch/test_parallel"),
    ("flops: a norm counts no flops", "_register.py", "channel = 4 if shapes", "channel = 0 if shapes", "pytorch/test_flops"),
    ("compile: a slice counts from the beginning of the storage", "_inductor_slices.py", "statically_known_true(base.storage_offset() == 0)", "True", "pytorch/test_in_place"),
    ("sharding: norm_rotate_qk takes Partial", "parallel.py", "(rotated if \"q_norm_weight\" not in call else ())", "rotated", "pytorch/test_parallel"),
    ("sharding: an axis that a later mesh dimension splits is split again", "parallel.py", "cut_up = any(getattr(p, \"dim\", None) == dim for p in self.placements[m + 1 :])", "cut_up = False", "pytorch/test_parallel"),
    ("yarn: the ramp is not rounded outwards", "frequencies/kinds.py", "math.floor(low), math.ceil(high)", "math.floor(low), math.floor(high)", "modules/test_frequencies"),
    ("dynamic: the factor ignores the trained length", "frequencies/kinds.py", "s = factor * length / original_max_position - (factor - 1)", "s = factor * length / original_max_position", "modules/test_frequencies"),
    ("llama3: the two ends of the ramp are exchanged", "frequencies/kinds.py", "Frequencies(f * s + f / float(factor) * (1 - s), 1.0)", "Frequencies(f / factor * s + f * (1 - s), 1.0)", "modules/test_frequencies"),
    ("interleaved M-RoPE: the first section decides the length of all sections", "multimodal.py", "if j < 3 * sections[j % 3]", "if j < 3 * sections[0]", "modules/test_multimodal"),
    ("cu_seqlens: the first token of a sequence belongs to the sequence before", "positions.py", "right=True", "right=False", "modules/test_multimodal"),
    ("RotaryEmbedding: the length is the highest position, without adding one", "frequencies/lengths.py", "- (-1 - offset)", "- (-offset)", "modules/test_rotary_embedding"),
    ("RotaryEmbedding: frequencies are made in the mode of the caller", "_sources.py", "undisturbed(self._make, exact, ", "self._make(exact, ", "modules/test_rotary_embedding"),
    ("RotaryEmbedding: what is assigned is cast", "module.py", "return moved if moved.dtype == t.dtype else t.to(moved.device)", "return moved", "modules/test_rotary_embedding"),
    ("configs: an unknown entry about a rotation is passed over", "frequencies/config.py", "_need(is_read, name", "_need(True, name", "modules/test_frequencies"),
    ("slots_of_window: older tokens are written", "positions.py", "(positions > newest - window)", "(positions >= newest - window)", "modules/test_multimodal"),
    ("RotaryEmbedding: dynamic uses a wrong exponent", "module.py", "trained, -2 / (rotary_dim - 2))", "trained, -2 / rotary_dim)", "modules/test_rotary_embedding"),
    ("functions: inverse is not passed", "_signatures.py", "self.flags, self.defaults = [a.name for a in flags]", "self.flags, self.defaults = [a.name.replace(\"inverse\", \"interleaved\") for a in flags]", "operators/test_reference"),
    ("reference: inverse is ignored", "reference.py", "s = -s if inverse else s", "s = s", "operators/test_values"),
    ("reference: a pad writes a cell of its own", "reference.py", "torch.where(slots < 0, repeated, ", "torch.where(slots < -1, repeated, ", "pytorch/test_export"),
    ("reference: a token past the last cell writes to the next block", "reference.py", "(p >= 0) & (p < block_size)", "p >= 0", "pytorch/test_export"),
    ("reference: a 16-bit result is rounded twice", "reference.py", "rotated = pairs * c.unsqueeze(axis) +", "rotated = (pairs * c.unsqueeze(axis)).to(x.dtype) +", "operators/test_values"),
    ("patch: the first tokens rotate", "integrations/_conventions.py", "to=lambda x: x.split(sizes, -2)[1]", "to=lambda x: x.split(sizes[::-1], -2)[0]", "integrations/test_rotary_functions"),
    ("patch: tables of the last forward are used again", "integrations/_rotary.py", "same = seen() is value and _mark(value) == mark", "same = _mark(value)[1:] == mark[1:]", "integrations/test_rotary_functions"),
    ("patch: a table with other memory is taken for the same", "integrations/_rotary.py", "same = seen() is value and _mark(value) == mark", "same = seen() is value", "integrations/test_rotary_functions"),
    ("patch: a function whose results are contiguous has those of x", "integrations/_rotary.py", "if self.known.dense else ys", "if False else ys", "integrations/test_rotary_functions"),
    ("patch: a head rotates in part where the function cannot", "integrations/_rotary.py", "if not (whole or self.known.partial) or", "if", "integrations/test_rotary_functions"),
    ("patch: source that is not that of the code is read", "integrations/_text.py", "if key not in trees or function.__code__ not in codes:", "if key not in trees:", "integrations/test_rotary_functions"),
    ("patch: the text of a function is known without its helpers", "integrations/_text.py", "for name in sorted(names - roles):", "for name in ():", "integrations/test_rotary_functions"),
    ("patch: defaults are no part of a text", "integrations/_text.py", "_dumped(tree.body), repr(defaults)]", "_dumped(tree.body)]", "integrations/test_rotary_functions"),
    ("patch: gradients of two products are added before they are rounded", "integrations/_bits.py", "if not r.converts_each:\n", "if True:\n", "integrations/test_rotary_functions"),
    ("patch: q is rounded for the wrong product", "integrations/_bits.py", "flags = flags | {\"eager_rounding\": not rounding.rounds_first_product}", "flags = flags | {\"eager_rounding\": True}", "integrations/test_conventions"),
    ("patch: what a method imports is not found", "integrations/_names.py", "elif i.opname in (\"LOAD_GLOBAL\", \"IMPORT_FROM\") and", "elif i.opname == \"LOAD_GLOBAL\" and", "integrations/test_names"),
    ("patch: a decorator keeps the old method", "integrations/_names.py", "types.CellType(new) if c.cell_contents is inner", "types.CellType(inner) if c.cell_contents is inner", "integrations/test_names"),
    ("patch: attributes get another name too", "integrations/_names.py", "if i.argval in names and i.opname not in", "if False and i.opname not in", "integrations/test_names"),
    ("patch: two functions get one name", "integrations/_names.py", "_{next(_numbers)}", "", "integrations/test_names"),
    ("patch: undo leaves names in modules", "integrations/_names.py", "weakref.finalize(code, home.pop, name, None).atexit = False", "pass", "integrations/test_names"),
    ("patch: a copy of a layer is not patched as it is", "integrations/_patch.py", "vars(new).update(vars(self))\n        return new", "return new", "integrations/test_patch"),
    ("patch: the hooks of accelerate keep the own forward", "integrations/_patch.py", "vars(self.module)[name] = types.MethodType(functions[value.__func__], self.module)", "pass", "integrations/test_transformers"),
    ("patch: undo does not tell that a processor was replaced since", "integrations/_patch.py", "                return True\n        return False", "                return True\n        return True", "integrations/test_patch"),
    ("patch: a hook of a norm is not seen", "integrations/_fuse.py", "hooks = own[\"_forward_hooks\"] or own", "hooks = own", "integrations/test_fuse"),
    ("patch: k is normalised by the weight of q", "integrations/transformers/fuse.py", "[weight_of(m, t) for m, t in zip(norms, (q, k), strict=False)]", "[weight_of(m, t) for m, t in zip(norms[:1] * 2, (q, k), strict=False)]", "integrations/test_fuse"),
    ("patch: the number of tokens of a StaticCache is not counted", "integrations/transformers/fuse.py", "layer.cumulative_length.add_(seq)", "pass", "integrations/test_fuse"),
    ("patch: a window that is full does not move", "integrations/transformers/fuse.py", "cells.copy_(cells.roll(-1, 2))", "pass", "integrations/test_fuse"),
    ("conventions: tables that need a gradient rotate too", "integrations/_rotary.py", "if cos.requires_grad and torch.is_grad_enabled() and not self.once:", "if False:", "integrations/test_conventions"),
    ("conventions: the tables of the first image are those of all", "integrations/_rotary.py", "t[0] if batch == 1 else t for t in (cos, sin)", "t[0] for t in (cos, sin)", "integrations/test_conventions"),
    ("timm: functions that take sin and cos side by side are not found", "integrations/timm.py", "\"(^|_)apply_rot\")", "\"(^|_)apply_rot_embed$\")", "integrations/test_rotary_functions"),
    ("comfy-kitchen: heads and seq are not swapped", "integrations/comfy_kitchen.py", "(1, 2) if column.shape[1] == 1 else (1, 1)", "(1, 2)", "integrations/test_comfy_kitchen"),
    ("selfcheck: a check that fails does not fail the run", "selfcheck/run.py", "return int(bool(failed))", "return 0", "tools/test_selfcheck"),
    ("selfcheck: a process may crash at its end", "selfcheck/run.py", "if not death and not errors:", "if not errors:", "tools/test_selfcheck"),
    ("selfcheck: a Metal kernel need not run in its check", "selfcheck/metal.py", "require(name in launches() - before,", "require(True,", "tools/test_selfcheck"),
    ("reference: an int8 is not rounded", "reference.py", ".max).round().to(dtype)", ".max).to(dtype)", "operators/test_cache"),
]  # fmt: skip

# ---- the builds ----

BUILDS = {
    "cpu": Build(
        tests=["tests/operators", "tests/backends/cpu", "tests/modules", "tests/pytorch"],
        command=["setup.py", "--quiet", "build_ext", "--inplace"],
        neighbours_in=[
            *(
                f"csrc/{name}"
                for name in ("cpu/cpu.cpp", "checks.cpp", "call.cpp", "backend.h", "autograd.cpp", "definition.cpp")
            ),
            *(f"csrc/cpu/{name}.inc" for name in ("head", "angles", "tiles", "rotate", "norm_backward")),
        ],
        neighbours=[
            "side: heads head_dim",
            *(f": {name}[0] {name}[1]" for name in ("grads", "result", "own", "primals", "tangents", "tables")),
        ],
        written=WRITTEN_CPU,
        edits=[("setup.py", '"-O3"', '"-O1"')],
    ),
    "cuda": Build(
        tests=["tests/operators", "tests/backends/cuda"],
        command=[EMULATOR],
        neighbours_in=[
            *(f"csrc/cuda/{name}.cu" for name in ("usual", "general", "norm_backward", "cos_sin")),
            *(f"csrc/cuda/{name}.cuh" for name in ("vectors", "token", "angles", "quantise", "norm")),
            *("csrc/cuda/cuda.cpp", "csrc/cuda/rotate_plan.h", "csrc/cuda/tiling.h", "csrc/plan.h", "csrc/token.h"),
        ],
        neighbours=[
            "t tiling: chunks rotated",
            "block in_block",
            "position_strides table_strides",
            "norms formats",
            "blockIdx threadIdx blockDim: x y z x",
        ],
        written=WRITTEN_CUDA,
        options=["--emulate=checked"],
        edits=[(EMULATOR, "-Werror ", "")],
    ),
    "metal": Build(
        tests=["tests/operators", *(f"tests/backends/metal/test_{name}.py" for name in ("metal", "loads_and_stores"))],
        command=[SIMULATOR, "--kernels"],
        neighbours_in=[
            *(f"shaders/{name}.metal" for name in ("rotate", "norm", "norm_backward", "cos_sin")),
            *(f"shaders/{name}.h" for name in ("device", "tokens", "angles", "chunks", "sums", "heads")),
            *("csrc/mps/mps.mm", "csrc/mps/dispatch.h", "csrc/chunk.h"),
        ],
        neighbours=[
            "r: chunks rotated",
            "r: tokens shares",
            "token: block in_block",
            "in_stride out_stride",
            *(f"of_token: {way}_head {way}_channel" for way in ("in", "out")),
            "q_weight k_weight",
            "p params: rotary_start rotary_dim",
            "q_scale k_scale v_scale",
            "c constants: native_weights in_place quantised normalised",
            ": k_native_weights k_in_place k_quantised k_normalised",
            *(f"walk walk_of_all: chunk{of} head{of}" for of in ("", "_step")),
        ],
        written=WRITTEN_METAL,
        # With all mistakes in it, a kernel reads more parameters.
        options=["--simulate", "-k", "not keeps_its_numbers_in_registers"],
        edits=[("tests/backends/metal/simulator/metal/shim.h", "#define UNWATCHED .*\n", "\\0" + plant.HEADER)],
    ),
}
