// Tables of cos and sin.
#include "device.h"

namespace rope {
namespace mps {

inline long whole_number(device const void* positions, ulong i) {
  switch (PositionType(k_position_type)) {
    case PositionType::kInt8:
      return static_cast<device const char*>(positions)[i];
    case PositionType::kUInt8:
      return static_cast<device const uchar*>(positions)[i];
    case PositionType::kInt16:
      return static_cast<device const short*>(positions)[i];
    case PositionType::kInt32:
      return static_cast<device const int*>(positions)[i];
    default:
      return static_cast<device const long*>(positions)[i];
  }
}

inline float number(device const void* positions, ulong i) {
  switch (PositionType(k_position_type)) {
    case PositionType::kHalf:
      return static_cast<float>(static_cast<device const half*>(positions)[i]);
    case PositionType::kBFloat16:
      return static_cast<float>(static_cast<device const bfloat*>(positions)[i]);
    default:
      return static_cast<device const float*>(positions)[i];
  }
}

// at: column, row. cos, sin: [rows, columns]
template <typename T>
[[kernel]] void cos_sin(constant CosSin& c [[buffer(0)]], device const void* positions [[buffer(1)]],
                        device const float* inv_freq [[buffer(2)]], device T* cos_out [[buffer(3)]],
                        device T* sin_out [[buffer(4)]], uint2 at [[thread_position_in_grid]],
                        uint2 size [[threads_per_grid]]) {
  const ulong position = ulong(at.y) * ulong(c.position_stride), to = ulong(at.y) * size.x + at.x;
  const float freq = inv_freq[ulong(at.x) * ulong(c.inv_freq_stride)];
  float cos, sin;
  if (PositionType(k_position_type) < PositionType::kHalf) {
    angle_of(whole_number(positions, position), freq, cos, sin);
  } else {
    float turns_hi, turns_lo;
    turns_per_position(freq, 0.0f, turns_hi, turns_lo);
    cos_sin_of(number(positions, position), 0.0f, turns_hi, turns_lo, cos, sin);
  }
  if (k_scaled) {
    cos = scaled(cos, c.factor_hi, c.factor_lo);
    sin = scaled(sin, c.factor_hi, c.factor_lo);
  }
  cos_out[to] = static_cast<T>(cos);
  sin_out[to] = static_cast<T>(sin);
}

ROPE_KERNEL("cos_sin_float", cos_sin<float>)
ROPE_KERNEL("cos_sin_half", cos_sin<half>)
ROPE_KERNEL("cos_sin_bfloat", cos_sin<bfloat>)

}  // namespace mps
}  // namespace rope
