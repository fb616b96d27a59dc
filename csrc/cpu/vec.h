// Vectors of floats and of doubles, as wide as the instruction set allows, built on the vector types of GCC and Clang.
// This file serves the AVX-512, AVX2, NEON and plain builds. Operators need no instructions by name; fma, rint,
// streaming stores and conversions of 16-bit types do. Conversions and copies of many numbers are at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Every function after this point may use the instruction set of the file that includes this header. No function with
// external linkage may be included after it: the linker keeps only one copy of an inline function, and that copy must
// not be the one with newer instructions.
#if defined(ROPE_AVX512)
#define ROPE_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif
#elif defined(ROPE_AVX2)
#define ROPE_VECTOR_BYTES 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#else
#define ROPE_VECTOR_BYTES 16
#endif

#define ROPE_INLINE inline __attribute__((always_inline))

namespace rope {
namespace {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- one number ----

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float rint(float a) { return __builtin_rintf(a); }
inline void cosine_and_sine(double angle, double& cos, double& sin) {
  cos = __builtin_cos(angle);
  sin = __builtin_sin(angle);
}

inline float to_arithmetic(float x) { return x; }
inline double to_arithmetic(double x) { return x; }
inline float to_arithmetic(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline float to_arithmetic(f16 x) {
#if defined(ROPE_AVX512) || defined(ROPE_AVX2)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return bits_as<__fp16>(x.bits);
#else
  // Shifts exponent and mantissa to where float32 has them. Multiplying by 2^112 corrects the bias of the exponent,
  // also for subnormals.
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
  if (magnitude >= 0x7c00u << 13)
    return bits_as<float>(sign | 0x7f800000u | magnitude | (magnitude > (0x7c00u << 13) ? 0x400000u : 0u));
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f));
#endif
}

// Rounds to nearest, ties to even. A NaN stays a NaN. Rounding to bfloat16 adds to the low half of the float, and that
// could make a NaN with a payload in the low half an infinity or a zero. But no such NaN gets here: arithmetic
// keeps the payload of an operand, and plain_nan clears the payloads of tables, frequencies, positions and weights.
inline void round_to(float x, float& out) { out = x; }
inline void round_to(double x, double& out) { out = x; }
inline void round_to(float x, bf16& out) {
  const uint32_t u = bits_as<uint32_t>(x);
  out.bits = uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
inline void round_to(float x, f16& out) {
#if defined(ROPE_AVX512) || defined(ROPE_AVX2)
  out.bits = uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  out.bits = bits_as<uint16_t>(__fp16(x));
#else
  const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above become infinite
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the float addition round at 2^-24
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  out.bits = uint16_t(sign | half);
#endif
}

// The type in which numbers of type T are computed: float or double.
template <typename T>
using arithmetic_t = decltype(to_arithmetic(T()));

// Returns x rounded to T. Float64 is never rounded to a narrower dtype.
template <typename T>
inline arithmetic_t<T> rounded(arithmetic_t<T> x) {
  T narrow;
  round_to(x, narrow);
  return to_arithmetic(narrow);
}

// Converts to float32 by rounding to odd: a result that is not exact is the neighbour with an odd mantissa. If it is
// then rounded to a dtype of less than 22 bits, the double is rounded once. Infinity stands for all numbers beyond
// float32.
inline float rounded_to_odd(float x) { return x; }
inline float rounded_to_odd(double x) {
  const float near = float(x);
  const int32_t bits = bits_as<int32_t>(near);
  if (double(near) == x || near != near || bits & 1 || (bits & 0x7fffffff) == 0x7f800000) return near;
  return bits_as<float>(__builtin_fabs(double(near)) > __builtin_fabs(x) ? bits - 1 : bits + 1);
}

inline float plain_nan(float a) { return a == a ? a : __builtin_nanf(""); }
inline double plain_nan(double a) { return a == a ? a : __builtin_nan(""); }

inline float root(float a) { return __builtin_sqrtf(a); }
inline double root(double a) { return __builtin_sqrt(a); }

// ---- a vector of numbers ----

typedef float f32v __attribute__((vector_size(ROPE_VECTOR_BYTES)));
typedef double f64v __attribute__((vector_size(ROPE_VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(ROPE_VECTOR_BYTES)));
typedef uint32_t u32half __attribute__((vector_size(ROPE_VECTOR_BYTES / 2)));  // as many as f64v has doubles
typedef int32_t i32v __attribute__((vector_size(ROPE_VECTOR_BYTES)));
typedef uint8_t u8v __attribute__((vector_size(ROPE_VECTOR_BYTES / 4)));  // as many numbers as f32v has floats
typedef uint64_t u64v __attribute__((vector_size(ROPE_VECTOR_BYTES)));
typedef uint16_t u16v __attribute__((vector_size(ROPE_VECTOR_BYTES / 2)));  // as many numbers as f32v has floats

template <typename V, typename P>
inline V load_bits(const P* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
// Stores v. stream: past the caches, for a result that is larger than they are; `to` must then be aligned to V. This
// saves reading each cache line before it is written.
template <bool stream = false, typename V, typename P>
inline void store_bits(P* to, V v) {
#if defined(__x86_64__)
  if constexpr (stream && sizeof v == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(v));
#endif
#if defined(ROPE_AVX512) || defined(ROPE_AVX2)
  if constexpr (stream && sizeof v == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(v));
#endif
#if defined(ROPE_AVX512)
  if constexpr (stream && sizeof v == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(v));
#endif
  std::memcpy(to, &v, sizeof v);
}

// Makes streamed results visible to other threads.
inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <typename N>
struct Vector {
  using Lanes = std::conditional_t<sizeof(N) == 4, f32v, f64v>;
  static constexpr int64_t size = ROPE_VECTOR_BYTES / sizeof(N);
  Lanes v;
  Vector() = default;
  explicit Vector(N x) : v(x - Lanes{}) {}
  explicit Vector(Lanes x) : v(x) {}
  friend Vector operator+(Vector a, Vector b) { return Vector(a.v + b.v); }
  friend Vector operator-(Vector a, Vector b) { return Vector(a.v - b.v); }
  friend Vector operator*(Vector a, Vector b) { return Vector(a.v * b.v); }
  friend Vector operator/(Vector a, Vector b) { return Vector(a.v / b.v); }
  friend Vector operator-(Vector a) { return Vector(-a.v); }
};
using Floats = Vector<float>;
using Doubles = Vector<double>;

// These are for ../quantise.h.
inline int32_t bits_of(float a) { return bits_as<int32_t>(a); }
inline float float_of(int32_t bits) { return bits_as<float>(bits); }
inline i32v bits_of(Floats a) { return i32v(a.v); }
inline Floats float_of(i32v bits) { return Floats(f32v(bits)); }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(ROPE_AVX512)
  return Floats(f32v(_mm512_fmadd_ps(__m512(a.v), __m512(b.v), __m512(c.v))));
#elif defined(ROPE_AVX2)
  return Floats(f32v(_mm256_fmadd_ps(__m256(a.v), __m256(b.v), __m256(c.v))));
#elif defined(__aarch64__)
  return Floats(f32v(vfmaq_f32(float32x4_t(c.v), float32x4_t(a.v), float32x4_t(b.v))));
#else
  for (int64_t i = 0; i < Floats::size; i++) a.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return a;
#endif
}

inline Doubles fma(Doubles a, Doubles b, Doubles c) {  // compilers find the instruction, if there is one
  for (int64_t i = 0; i < Doubles::size; i++) a.v[i] = __builtin_fma(a.v[i], b.v[i], c.v[i]);
  return a;
}

// Returns the sum of all n lanes: adds the upper half of the lanes to the lower half, until one number is left.
template <typename N, int64_t n = Vector<N>::size, typename Lanes>
ROPE_INLINE N sum_of_lanes(Lanes lanes) {
  if constexpr (n == 1) {
    return lanes[0];
  } else {
    typedef N Half __attribute__((vector_size(sizeof lanes / 2)));
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof halves);
    return sum_of_lanes<N, n / 2>(halves[0] + halves[1]);
  }
}

inline Floats rint(Floats a) {
#if defined(ROPE_AVX512)
  return Floats(f32v(_mm512_roundscale_ps(__m512(a.v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#elif defined(ROPE_AVX2)
  return Floats(f32v(_mm256_round_ps(__m256(a.v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#elif defined(__aarch64__)
  return Floats(f32v(vrndnq_f32(float32x4_t(a.v))));
#else
  for (int64_t i = 0; i < Floats::size; i++) a.v[i] = __builtin_rintf(a.v[i]);
  return a;
#endif
}

// Returns (x1, x0, x3, x2, ...) for (x0, x1, x2, x3, ...). The shifts rotate each 64-bit lane by 32 bits.
inline Floats swap_pairs(Floats a) {
  const u64v u = u64v(a.v);
  return Floats(f32v((u << 32) | (u >> 32)));
}
inline Doubles swap_pairs(Doubles a) {
  Doubles b;
  for (int64_t i = 0; i < Doubles::size; i++) b.v[i] = a.v[i ^ 1];
  return b;
}

// A vector of bfloat16 is read as 32-bit lanes of two elements each. These functions return the even and the odd
// elements as floats. A shift or a mask is enough; nothing is shuffled, neither here nor in lanes_of.
inline Floats even_elements(u32v lanes) { return Floats(f32v(lanes << 16)); }
inline Floats odd_elements(u32v lanes) { return Floats(f32v(lanes & 0xffff0000u)); }
// Rounds to bfloat16, which is then the high half of each lane. The low half has no meaning.
inline u32v rounded_high(Floats a) {
#if defined(ROPE_AVX512)
  // The two halves of a lane of `more` are the last bit that is kept and 0x7fff. One instruction adds both to the lane.
  const __m512i u = __m512i(a.v);
  const __m512i more = _mm512_ternarylogic_epi32(u, _mm512_set1_epi32(0x10000), _mm512_set1_epi32(0x7fff), 0xea);
  return u32v(_mm512_dpwssd_epi32(u, more, _mm512_set1_epi16(1)));
#else
  const u32v u = u32v(a.v);
  return u + 0x7fff + ((u >> 16) & 1);
#endif
}
// Rounds to bfloat16 and returns the lanes of even_elements and odd_elements.
inline u32v lanes_of(Floats even, Floats odd) { return (rounded_high(even) >> 16) | (rounded_high(odd) & 0xffff0000u); }

inline Floats load(const float* from) { return Floats(load_bits<f32v>(from)); }
template <bool stream = false>
inline void store(float* to, Floats a) {
  store_bits<stream>(to, a.v);
}

inline Floats load(const bf16* from) {
  return Floats(f32v(__builtin_convertvector(load_bits<u16v>(from), u32v) << 16));
}
template <bool stream = false>
inline void store(bf16* to, Floats a) {
  store_bits<stream>(to, __builtin_convertvector(rounded_high(a) >> 16, u16v));
}

inline Floats load(const f16* from) {
#if defined(ROPE_AVX512)
  return Floats(f32v(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))));
#elif defined(ROPE_AVX2)
  return Floats(f32v(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__aarch64__)
  return Floats(f32v(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))))));
#else
  Floats a;
  for (int64_t i = 0; i < Floats::size; i++) a.v[i] = to_arithmetic(from[i]);
  return a;
#endif
}
template <bool stream = false>
inline void store(f16* to, Floats a) {
#if defined(ROPE_AVX512)
  store_bits<stream>(to, _mm512_cvtps_ph(__m512(a.v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(ROPE_AVX2)
  store_bits<stream>(to, _mm256_cvtps_ph(__m256(a.v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(a.v))));
#else
  for (int64_t i = 0; i < Floats::size; i++) round_to(a.v[i], to[i]);
#endif
}

// Returns a with each number rounded to T.
template <typename T>
inline Floats rounded(Floats a) {
  if constexpr (__is_same(T, bf16)) return odd_elements(rounded_high(a));
  if constexpr (__is_same(T, f16)) {
    f16 narrow[Floats::size];
    store(narrow, a);
    return load(narrow);
  }
  return a;
}
template <typename T>
inline Doubles rounded(Doubles a) {
  return a;
}

inline Doubles load(const double* from) { return Doubles(load_bits<f64v>(from)); }
template <bool stream = false>
inline void store(double* to, Doubles a) {
  store_bits<stream>(to, a.v);
}

// ---- many numbers ----

// Converts n numbers from T to its arithmetic type, or back, or copies them. Each stride leads to the next number.
template <typename From, typename To>
void convert(const From* x, int64_t x_stride, To* y, int64_t y_stride, int64_t n) {
  int64_t i = 0;
  if constexpr (sizeof(From) <= 4 && sizeof(To) <= 4) {
    if (x_stride == 1 && y_stride == 1) {
      for (; i + Floats::size <= n; i += Floats::size) store(y + i, load(x + i));
    }
  }
  for (; i < n; i++) round_to(to_arithmetic(x[i * x_stride]), y[i * y_stride]);
}
// Converts n numbers of a tensor that serves many heads, such as a table or a weight. Replaces each NaN by one that
// rounds to a NaN (see round_to).
template <typename T, typename A>
void read_parameters(const T* x, int64_t stride, A* to, int64_t n) {
  convert(x, stride, to, 1, n);
  for (int64_t i = 0; i < n; i++) to[i] = plain_nan(to[i]);
}

// Computes numbers = f(numbers, others...), vector by vector. The buffers are padded to whole vectors.
template <typename A, typename F, typename... Others>
ROPE_INLINE void map_numbers(int64_t n, F&& f, A* numbers, const Others*... others) {
  for (int64_t i = 0; i < n; i += Vector<A>::size) store(numbers + i, f(load(numbers + i), load(others + i)...));
}

// Copies rows of x to columns of y: as many, and as many numbers of each, as a vector of 16 bytes has. Each stride
// leads to the next row.
template <typename T, size_t... i>
inline void transpose_square(const T* x, int64_t x_stride, T* y, int64_t y_stride, std::index_sequence<i...>) {
  typedef std::conditional_t<sizeof(T) == 2, uint16_t, T> V __attribute__((vector_size(16)));
  constexpr int64_t n = sizeof...(i), half = n / 2;
  V rows[n] = {load_bits<V>(x + int64_t(i) * x_stride)...}, zipped[n];
  for (int64_t round = 1; round < n; round *= 2) {  // each zips row j with row j + n / 2: (a0, b0, a1, b1, ...)
    for (int64_t j = 0; j < half; j++) {
      const V a = rows[j], b = rows[j + half];
      zipped[2 * j] = V{(i % 2 ? b : a)[i / 2]...};
      zipped[2 * j + 1] = V{(i % 2 ? b : a)[half + i / 2]...};
    }
    std::memcpy(rows, zipped, sizeof rows);
  }
  (store_bits(y + int64_t(i) * y_stride, rows[i]), ...);
}

}  // namespace
}  // namespace rope
