// The shaders that are embedded in this library. shaders/embed.py writes the file that defines these variables.
#pragma once

#include <cstddef>

namespace rope::mps {

extern const char kSource[];            // all shaders as one text, with their headers inlined
extern const unsigned char kLibrary[];  // the compiled shaders, if the build machine had Metal's compiler
extern const std::size_t kLibrarySize;  // 0: the shaders were not compiled

}  // namespace rope::mps
