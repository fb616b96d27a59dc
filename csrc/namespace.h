// The namespace of the operators in PyTorch: torch.ops.rope. In the layout for the Hugging Face Hub, hub/layout.py
// writes another one into this file, because versions of a kernel must be able to share a process. Messages say rope in
// all of them.
#pragma once

#ifndef ROPE_NAMESPACE
#define ROPE_NAMESPACE rope
#endif
