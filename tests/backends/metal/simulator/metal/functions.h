// Declares, in the namespace metal, functions and some templates of Apple's metal_stdlib that the simulator does not
// run. A shader that calls one of them is refused, and so is one that gives its own function or struct a name in this
// file, which metal.py reads. RUN names what shim.h defines. Names and types are those of the Metal Shading Language
// Specification.

// clang-format off

#define NOT_RUN __attribute__((unavailable("the simulator does not run it")))
#define RUN(name)
#define OTHER(name)            \
  template <typename... Given> \
  void name(Given...) NOT_RUN;
#define TEMPLATE(name)         \
  template <typename... Given> \
  struct name;

#define EACH_VECTOR(X, T, name) X(T##2, T, name) X(T##3, T, name) X(T##4, T, name)
#define EACH_FLOAT(X, name) \
  X(float, float, name) EACH_VECTOR(X, float, name) X(half, half, name) EACH_VECTOR(X, half, name)
#define EACH_WIDTH(X, T, name) X(T, T, name) EACH_VECTOR(X, T, name)
#define EACH_INTEGER(X, name) \
  EACH_WIDTH(X, char, name) EACH_WIDTH(X, uchar, name) EACH_WIDTH(X, short, name) EACH_WIDTH(X, ushort, name) \
  EACH_WIDTH(X, int, name) EACH_WIDTH(X, uint, name) EACH_WIDTH(X, long, name) EACH_WIDTH(X, ulong, name)

#define OF_1(T, S, name) T name(T) NOT_RUN;
#define OF_2(T, S, name) T name(T, T) NOT_RUN;
#define OF_3(T, S, name) T name(T, T, T) NOT_RUN;
#define TO_SCALAR_1(T, S, name) S name(T) NOT_RUN;
#define TO_SCALAR_2(T, S, name) S name(T, T) NOT_RUN;
#define FLOAT_1(name) EACH_FLOAT(OF_1, name)
#define FLOAT_2(name) EACH_FLOAT(OF_2, name)
#define FLOAT_3(name) EACH_FLOAT(OF_3, name)
#define INTEGER_1(name) EACH_INTEGER(OF_1, name)
#define INTEGER_2(name) EACH_INTEGER(OF_2, name)
#define INTEGER_3(name) EACH_INTEGER(OF_3, name)
#define VECTOR_1(name) EACH_VECTOR(TO_SCALAR_1, float, name) EACH_VECTOR(TO_SCALAR_1, half, name)
#define VECTOR_2(name) EACH_VECTOR(TO_SCALAR_2, float, name) EACH_VECTOR(TO_SCALAR_2, half, name)

RUN(fma) RUN(rint) RUN(fabs) RUN(isfinite) RUN(min) RUN(max) RUN(as_type) RUN(threadgroup_barrier)
RUN(simd_shuffle_xor)

FLOAT_1(acos) FLOAT_1(acosh) FLOAT_1(asin) FLOAT_1(asinh) FLOAT_1(atan) FLOAT_1(atanh) FLOAT_1(ceil) FLOAT_1(cos)
FLOAT_1(cosh) FLOAT_1(cospi) FLOAT_1(exp) FLOAT_1(exp2) FLOAT_1(exp10) FLOAT_1(floor) FLOAT_1(fract) FLOAT_1(log)
FLOAT_1(log2) FLOAT_1(log10) FLOAT_1(round) FLOAT_1(rsqrt) FLOAT_1(saturate) FLOAT_1(sign) FLOAT_1(sin) FLOAT_1(sinh)
FLOAT_1(sinpi) FLOAT_1(sqrt) FLOAT_1(tan) FLOAT_1(tanh) FLOAT_1(tanpi) FLOAT_1(trunc)
FLOAT_2(atan2) FLOAT_2(copysign) FLOAT_2(divide) FLOAT_2(fdim) FLOAT_2(fmax) FLOAT_2(fmin) FLOAT_2(fmod)
FLOAT_2(nextafter) FLOAT_2(pow) FLOAT_2(powr) FLOAT_2(step)
FLOAT_3(clamp) FLOAT_3(fmax3) FLOAT_3(fmedian3) FLOAT_3(fmin3) FLOAT_3(max3) FLOAT_3(median3) FLOAT_3(min3) FLOAT_3(mix)
FLOAT_3(smoothstep)
OTHER(frexp) OTHER(ilogb) OTHER(ldexp) OTHER(modf) OTHER(sincos)

INTEGER_1(abs) INTEGER_1(clz) INTEGER_1(ctz) INTEGER_1(popcount) INTEGER_1(reverse_bits)
INTEGER_2(absdiff) INTEGER_2(addsat) INTEGER_2(hadd) INTEGER_2(mul24) INTEGER_2(mulhi) INTEGER_2(rhadd) INTEGER_2(rotate)
INTEGER_2(subsat)
INTEGER_3(clamp) INTEGER_3(mad24) INTEGER_3(madhi) INTEGER_3(madsat) INTEGER_3(max3) INTEGER_3(median3) INTEGER_3(min3)
OTHER(extract_bits) OTHER(insert_bits)

VECTOR_1(length) VECTOR_1(length_squared) VECTOR_2(distance) VECTOR_2(distance_squared) VECTOR_2(dot)
OTHER(cross) OTHER(faceforward) OTHER(normalize) OTHER(reflect) OTHER(refract) OTHER(determinant) OTHER(transpose)
OTHER(all) OTHER(any) OTHER(isinf) OTHER(isnan) OTHER(isnormal) OTHER(isordered) OTHER(isunordered) OTHER(select)
OTHER(signbit)

OTHER(simd_active_threads_mask) OTHER(simd_all) OTHER(simd_and) OTHER(simd_any) OTHER(simd_ballot) OTHER(simd_broadcast)
OTHER(simd_broadcast_first) OTHER(simd_is_first) OTHER(simd_is_helper_thread) OTHER(simd_max) OTHER(simd_min) OTHER(simd_or)
OTHER(simd_prefix_exclusive_product) OTHER(simd_prefix_exclusive_sum) OTHER(simd_prefix_inclusive_product)
OTHER(simd_prefix_inclusive_sum) OTHER(simd_product) OTHER(simd_shuffle) OTHER(simd_shuffle_and_fill_down)
OTHER(simd_shuffle_and_fill_up) OTHER(simd_shuffle_down) OTHER(simd_shuffle_rotate_down) OTHER(simd_shuffle_rotate_up)
OTHER(simd_shuffle_up) OTHER(simd_sum) OTHER(simd_xor)
OTHER(quad_active_threads_mask) OTHER(quad_all) OTHER(quad_and) OTHER(quad_any) OTHER(quad_ballot)
OTHER(quad_broadcast) OTHER(quad_broadcast_first) OTHER(quad_is_first) OTHER(quad_is_helper_thread) OTHER(quad_max)
OTHER(quad_min) OTHER(quad_or) OTHER(quad_prefix_exclusive_product) OTHER(quad_prefix_exclusive_sum)
OTHER(quad_prefix_inclusive_product) OTHER(quad_prefix_inclusive_sum) OTHER(quad_product) OTHER(quad_shuffle)
OTHER(quad_shuffle_and_fill_down) OTHER(quad_shuffle_and_fill_up) OTHER(quad_shuffle_down) OTHER(quad_shuffle_rotate_down)
OTHER(quad_shuffle_rotate_up) OTHER(quad_shuffle_up) OTHER(quad_shuffle_xor) OTHER(quad_sum) OTHER(quad_xor)
OTHER(simdgroup_barrier) OTHER(simdgroup_load) OTHER(simdgroup_multiply) OTHER(simdgroup_multiply_accumulate)
OTHER(simdgroup_store) OTHER(make_filled_simdgroup_matrix)
OTHER(atomic_compare_exchange_weak_explicit) OTHER(atomic_exchange_explicit) OTHER(atomic_fetch_add_explicit)
OTHER(atomic_fetch_and_explicit) OTHER(atomic_fetch_max_explicit) OTHER(atomic_fetch_min_explicit)
OTHER(atomic_fetch_or_explicit) OTHER(atomic_fetch_sub_explicit) OTHER(atomic_fetch_xor_explicit) OTHER(atomic_load_explicit)
OTHER(atomic_store_explicit) OTHER(atomic_thread_fence)
OTHER(dfdx) OTHER(dfdy) OTHER(discard_fragment) OTHER(fwidth)

TEMPLATE(array) TEMPLATE(atomic) TEMPLATE(conditional) TEMPLATE(enable_if) TEMPLATE(imageblock) TEMPLATE(integral_constant)
TEMPLATE(is_same) TEMPLATE(make_signed) TEMPLATE(make_unsigned) TEMPLATE(numeric_limits) TEMPLATE(simdgroup_matrix) TEMPLATE(texture1d)
TEMPLATE(texture2d) TEMPLATE(texture3d) TEMPLATE(texture_buffer) TEMPLATE(texturecube)
// clang-format on

#undef OTHER
#undef TEMPLATE
#undef RUN
