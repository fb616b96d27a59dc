// The tables of cos and sin of the operators cos_sin and axial_cos_sin.
#include "angles.h"

namespace rope {

template <typename P>
inline P position_at(device const void* positions, ulong i) {
  return static_cast<device const P*>(positions)[i];
}
// Returns the position with index i, which has an integer type.
inline long whole_number(device const void* positions, ulong i) {
  const DType type = DType(k_position_dtype);
  return type == DType::kInt8    ? long(position_at<char>(positions, i))
         : type == DType::kUInt8 ? long(position_at<uchar>(positions, i))
         : type == DType::kInt16 ? long(position_at<short>(positions, i))
         : type == DType::kInt32 ? long(position_at<int>(positions, i))
                                 : position_at<long>(positions, i);
}

// Computes the angle of one axis, in turns: fraction + rest, as turns_of in csrc/angle.h does. i: the index of its
// position; at, part: see turns_at
inline void turns_of_axis(device const void* positions, ulong i, device const float* inv_freq, ulong at, ulong part,
                          thread float& fraction, thread float& rest) {
  float turns_hi, turns_lo;
  turns_at(inv_freq, at, part, turns_hi, turns_lo);
  if (DType(k_position_dtype) > DType::kDouble) {
    turns_of_position(whole_number(positions, i), turns_hi, turns_lo, fraction, rest);
  } else {
    turns_of(position_at<float>(positions, i), 0.0f, turns_hi, turns_lo, fraction, rest);
  }
}

}  // namespace rope

// Writes cos and sin, [rows, columns]: a row for each token and a column for each pair. at: the column and the row. The
// angle is the sum over the axes.
template <typename T>
ROPE_KERNEL(kThreads)
void cos_sin_kernel(constant CosSinArgs& p [[buffer(0)]], device const void* positions [[buffer(1)]],
                    device const float* inv_freq [[buffer(2)]], device T* cos_out [[buffer(3)]],
                    device T* sin_out [[buffer(4)]], uint2 at [[thread_position_in_grid]],
                    uint2 size [[threads_per_grid]]) {
  const ulong to = ulong(at.y) * size.x + at.x;
  ulong position = ulong(at.y) * ulong(p.position_strides[1]), freq = ulong(at.x) * ulong(p.inv_freq_strides[2]);
  const ulong part = ulong(p.inv_freq_strides[0]);
  float fraction = 0.0f, rest = 0.0f, cos, sin;
  if (p.axes) turns_of_axis(positions, position, inv_freq, freq, part, fraction, rest);
  for (long axis = 1; axis < p.axes; axis++) {
    position += ulong(p.position_strides[0]);
    freq += ulong(p.inv_freq_strides[1]);
    float more_fraction, more_rest;
    turns_of_axis(positions, position, inv_freq, freq, part, more_fraction, more_rest);
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
