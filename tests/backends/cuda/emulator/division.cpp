// Compares the division of csrc/cuda/quantise.cuh with the operator /, for test_cuda.py.
#include <algorithm>
#include <random>
#include <sstream>
#include <vector>

#include "../../../../csrc/cuda/quantise.cuh"

using namespace rope;

// Returns whether a quotient is quantised to other numbers than that of the operator /, or differs from it in any bit
// though the formats need its bits: between 2^-20 and 2^20.
static bool differs(const cuda::Divisor& divisor, float x, float scale) {
  float quotient[1] = {x};
  divisor.divide(quotient);
  const float found = quotient[0], expected = x / scale, size = fabsf(expected);
  const auto codes = [](float q) {
    return (quantised(q, E4M3()) & 0xff) | (quantised(q, E5M2()) & 0xff) << 8 | (quantised(q, Int8()) & 0xff) << 16;
  };
  return codes(found) != codes(expected) || (size > 0x1p-20f && size < 0x1p20f && found != expected);
}

// Returns the first divisions that are wrong, a line for each. Each scale divides all float16 and all bfloat16 numbers,
// and then random scales divide `count` random float32 numbers. A random number has random bits, or an exponent near
// that of its scale.
std::string wrong_divisions(int count, unsigned seed, const std::vector<float>& scales) {
  std::ostringstream wrong;
  const auto check = [&](const cuda::Divisor& divisor, float x, float scale) {
    if (wrong.tellp() < 1000 && differs(divisor, x, scale)) wrong << std::hexfloat << x << " / " << scale << "\n";
  };
  for (const float scale : scales) {
    const cuda::Divisor divisor(scale);
    for (int bits = 0; bits < 1 << 16; bits++) {
      check(divisor, float_of(bits << 16), scale);
      check(divisor, __half2float({static_cast<unsigned short>(bits)}), scale);
    }
  }
  std::mt19937_64 random(seed);
  for (; count > 0; count -= 1000) {
    const int bits = int(random());
    const float scale = float_of(bits);
    const cuda::Divisor divisor(scale);
    for (int i = 0; i < 1000; i++) {
      const uint64_t drawn = random();
      const int exponent = std::clamp((bits >> 23 & 0xff) + int(drawn >> 32) % 24, 0, 255);
      const int x = i % 2 ? int(drawn) : (int(drawn) & int(0x807fffff)) | exponent << 23;
      check(divisor, float_of(x), scale);
    }
  }
  return wrong.str();
}
