// The kernels as text, which Metal compiles on the user's machine. A kernel is an instance of a template in shaders/,
// and its text is the file of the template with this one instance at the end: so a call compiles only what it needs.
#pragma once

#include <compare>
#include <string>
#include <string_view>

#include "interface.h"

namespace rope::mps {

// A file of shaders/. shaders/embed.py writes the source that defines kShaders.
struct Shader {
  std::string_view file;  // its name, without .metal
  const char* text;       // with its headers inlined
};
constexpr int kShaderCount = 4;
extern const Shader kShaders[kShaderCount];

// The instance of the template <family>_kernel for one type of x, and if the template has these parameters for one V
// and one width of element offsets; otherwise the numbers are 0. The texts live as long as the process.
struct Kernel {
  std::string_view file, family, type;
  int vector = 0, offset_bits = 0;

  auto operator<=>(const Kernel&) const = default;

  // Returns a name such as rotate_bfloat_v8_u32.
  std::string name() const {
    std::string name = std::string(family).append("_").append(type);
    if (vector) name += "_v" + std::to_string(vector);
    if (offset_bits) name += "_u" + std::to_string(offset_bits);
    return name;
  }

  // Returns the text that Metal compiles.
  std::string source() const {
    std::string instance = std::string(family).append("_kernel<").append(type);
    if (vector) instance += ", " + std::to_string(vector);
    if (offset_bits) instance += offset_bits == 32 ? ", uint" : ", ulong";
    instance += ">";
    const Shader* shader = kShaders;
    while (shader->file != file) shader++;
    return shader->text +
           ("template [[host_name(\"" + name() + "\")]] [[kernel]] decltype(" + instance + ") " + instance + ";\n");
  }
};

// The values of the function constants, which Metal takes when it makes a pipeline of a kernel.
struct Constants {
#define ROPE_MEMBER(index, name) int name;
  ROPE_CONSTANTS(ROPE_MEMBER)
#undef ROPE_MEMBER
  auto operator<=>(const Constants&) const = default;
};

}  // namespace rope::mps
