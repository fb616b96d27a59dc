"""Tests that the library compiles for macOS (arm64) and links with releases of torch for it."""

import re
import sys

import macos
import pytest
from cases import needed

# These tests are one group for pytest-xdist, because a second worker would only wait for the compiler of the first.
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.xdist_group("macos"),
    pytest.mark.skipif(sys.platform != "linux", reason="macOS compiles the library itself"),
]

# Everything else in at::mps may have another layout or be missing in another release.
OF_AT_MPS = [
    "19getCurrentMPSStreamE",
    "9MPSDevice11getInstanceE",
    "9MPSStream14commandEncoderE",
    "14getMPSProfilerE",
    "8Profiler11MPSProfiler18beginProfileKernelE",
    "8Profiler11MPSProfiler16endProfileKernelE",
]
# The messages that torch records when it captures a graph, and the barrier. None of them ends the encoder or waits.
ENCODER = """
    memoryBarrierWithScope:
    setComputePipelineState: setBuffer:offset:atIndex: setBytes:length:atIndex: setThreadgroupMemoryLength:atIndex:
    dispatchThreads:threadsPerThreadgroup: dispatchThreadgroups:threadsPerThreadgroup:
"""
OTHERS = """
    UTF8String localizedDescription maxTotalThreadsPerThreadgroup new newComputePipelineStateWithFunction:error:
    newFunctionWithName:constantValues:error: newLibraryWithSource:options:error:
    respondsToSelector: setConstantValues:type:withRange: setFastMathEnabled: setLanguageVersion:
    setMathFloatingPointFunctions: setMathMode: stringWithUTF8String: threadExecutionWidth
"""


@pytest.fixture(params=macos.RELEASES)
def release(request):
    macos.wheel(request.param)
    return request.param


def test_the_library_links_and_sends_only_known_messages(release):
    needed("ziglang")
    objects = macos.compile(release)
    macos.link(release, objects)
    threads = next(path for path in objects if path.name == "cpu.cpp.o")
    assert "___kmpc_fork_call" in macos.undefined([threads])  # at::parallel_for is not serial; torch's libomp has it
    host = next(path for path in objects if path.name == "mps.mm.o")
    assert macos.selectors(host) <= {*ENCODER.split(), *OTHERS.split()}
    used = {name for name in macos.undefined(objects) if "3mps" in name}
    assert all(sum(f"3mps{function}" in name for name in used) == 1 for function in OF_AT_MPS)
    assert len(used) == len(OF_AT_MPS)


def test_torch_encodes_and_compiles_as_docs_metal_md_says(release):
    library = (macos.wheel(release) / "lib/libtorch_cpu.dylib").read_bytes()
    # Its encoders run one dispatch after the other; these two messages make others.
    assert b"\0computeCommandEncoder\0" in library
    assert not re.search(b"computeCommandEncoderWith(DispatchType|Descriptor):", library)
    kernels = macos.air(library)
    assert len(kernels) > 5000
    assert all(b"air.compile.fast_math_disable" in kernel for kernel in kernels)
    assert all(b"air.compile.denorms_disable" in kernel for kernel in kernels)
    # Apple's compiler contracts although fast math is off. An fma is a function of AIR, which LLVM does not know and
    # cannot fold.
    assert any(b"llvm.fmuladd." in kernel for kernel in kernels)
    assert any(b"air.fma.f32" in kernel for kernel in kernels)
    assert not any(b"llvm.fma." in kernel for kernel in kernels)


@pytest.mark.parametrize("chosen", [None, "15.0"])
def test_the_build_is_for_macos_14_if_nothing_else_is_chosen(chosen):
    """The wheel's platform follows from MACOSX_DEPLOYMENT_TARGET."""
    given = {} if chosen is None else {"MACOSX_DEPLOYMENT_TARGET": chosen}
    assert macos.setup(**given)[1] == (chosen or "14.0")
