// The tables of cos and sin of the operators cos_sin and axial_cos_sin.
#include "angles.h"

namespace rope {

// Returns the position with index i, which has an integer type.
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

// Returns the angle of one axis, in turns: fraction + rest, as turns_of in csrc/angle.h does.
inline void turns_at(device const void* positions, ulong i, Frequency inv_freq, thread float& fraction,
                     thread float& rest) {
  if (PositionType(k_position_type) < PositionType::kFloat) {
    turns_of_position(whole_number(positions, i), inv_freq, fraction, rest);
  } else {
    float turns_hi, turns_lo;
    turns_per_position(inv_freq.hi, inv_freq.lo, turns_hi, turns_lo);
    turns_of(static_cast<device const float*>(positions)[i], 0.0f, turns_hi, turns_lo, fraction, rest);
  }
}

}  // namespace rope

// Writes cos and sin, [rows, columns]: a row for each token and a column for each pair. at: the column and the row. The
// angle is the sum over the axes.
template <typename T>
[[kernel]] void cos_sin(constant CosSinParams& p [[buffer(0)]], device const void* positions [[buffer(1)]],
                        device const float* inv_freq [[buffer(2)]], device T* cos_out [[buffer(3)]],
                        device T* sin_out [[buffer(4)]], uint2 at [[thread_position_in_grid]],
                        uint2 size [[threads_per_grid]]) {
  const ulong to = ulong(at.y) * size.x + at.x;
  ulong position = ulong(at.y) * ulong(p.positions[1]), freq = ulong(at.x) * ulong(p.inv_freq[2]);
  const ulong part = ulong(p.inv_freq[0]);
  float fraction = 0.0f, rest = 0.0f, cos, sin;
  if (p.axes) turns_at(positions, position, frequency_at(inv_freq, freq, part), fraction, rest);
  for (long axis = 1; axis < p.axes; axis++) {
    position += ulong(p.positions[0]);
    freq += ulong(p.inv_freq[1]);
    float more_fraction, more_rest;
    turns_at(positions, position, frequency_at(inv_freq, freq, part), more_fraction, more_rest);
    add_turns(more_fraction, more_rest, fraction, rest);
  }
  cos_sin_of_turns(fraction, rest, cos, sin);
  if (k_scaled) {
    cos = scaled(cos, p.factor_hi, p.factor_lo);
    sin = scaled(sin, p.factor_hi, p.factor_lo);
  }
  cos_out[to] = static_cast<T>(cos);
  sin_out[to] = static_cast<T>(sin);
}

ROPE_KERNEL("cos_sin_float", cos_sin<float>)
ROPE_KERNEL("cos_sin_half", cos_sin<half>)
ROPE_KERNEL("cos_sin_bfloat", cos_sin<bfloat>)
