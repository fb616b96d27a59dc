// The shaders inside this library. shaders/embed.py writes what defines these.
#pragma once

#include <cstddef>

namespace rope::mps {

extern const char kSource[];            // all of them as one text, headers inlined
extern const unsigned char kLibrary[];  // the same compiled, where the build machine had Metal's compiler
extern const std::size_t kLibrarySize;  // 0: it had not

}  // namespace rope::mps
