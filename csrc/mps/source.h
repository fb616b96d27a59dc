// The shaders that are embedded in this library: a text for each file in shaders/, so that a call compiles only what it
// needs. shaders/embed.py writes the file that defines these variables.
#pragma once

#include <cstddef>

namespace rope::mps {

struct Shader {
  const char* file;              // the name of the file, without .metal
  const char* source;            // its text, with its headers inlined
  const unsigned char* library;  // the compiled shader, if the build machine had Metal's compiler
  std::size_t library_size;      // 0: it was not compiled
};
constexpr int kShaderCount = 5;
extern const Shader kShaders[kShaderCount];

}  // namespace rope::mps
