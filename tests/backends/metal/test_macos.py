"""Tests that the library compiles for macOS (arm64) and links with releases of torch for it."""

import importlib.util
import os
import runpy
import sys

import macos
import pytest
import setuptools
from cases import ROOT, missing
from torch.utils.cpp_extension import BuildExtension  # noqa: F401  (its import fails if another platform is pretended)

# These tests are one group for pytest-xdist, because a second worker would only wait for the compiler of the first.
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("macos")]


@pytest.fixture(autouse=True)
def _tools():
    if sys.platform != "linux":
        pytest.skip("macOS compiles the library itself")
    if not importlib.util.find_spec("ziglang"):
        missing("ziglang is not installed")


@pytest.fixture(params=macos.RELEASES)
def release(request):
    return request.param


@pytest.fixture
def objects(release):
    try:
        return macos.compile(release)
    except macos.Unavailable as error:
        missing(str(error))


@pytest.fixture
def host(objects):
    return next(path for path in objects if path.name == "mps.mm.o")


@pytest.fixture
def libraries(release):
    try:
        macos.wheel(release)
    except macos.Unavailable as error:
        missing(str(error))


def test_the_library_uses_only_known_symbols_of_torch(release, objects):
    unknown = macos.from_torch(objects) - macos.listed(release)
    assert not unknown, "torch for macOS may lack these symbols; check: python tests/backends/metal/macos.py --update"


def test_the_library_links(release, objects, libraries):
    macos.link(release, objects)


@pytest.mark.parametrize("release", [max(macos.RELEASES)])
def test_a_misspelt_symbol_does_not_link(release, objects, host, libraries):
    """A function that is declared and called under a wrong name compiles, but must not link."""
    (misspelt,) = macos.compile(release, [macos.HOST], misspelt="getCurrentMPSStream")
    others = [path for path in objects if path != host]
    with pytest.raises(RuntimeError, match="undefined symbol: .*getCurrentMPSStreams"):
        macos.link(release, [misspelt, *others])


def test_of_at_mps_only_the_stream_the_device_and_the_profiler_are_used(objects):
    """Everything else in at::mps may have another layout or be missing in another release."""
    used = {name for name in macos.from_torch(objects) if "3mps" in name}
    functions = [
        "19getCurrentMPSStreamE",
        "9MPSDevice11getInstanceE",
        "9MPSStream14commandEncoderE",
        "14getMPSProfilerE",
        "8Profiler11MPSProfiler18beginProfileKernelE",
        "8Profiler11MPSProfiler16endProfileKernelE",
    ]
    assert all(sum(f"3mps{function}" in name for name in used) == 1 for function in functions)
    assert len(used) == len(functions)


# The messages that torch records when it captures a graph. None of them ends the encoder or waits.
ENCODER = {
    "setComputePipelineState:",
    "setBuffer:offset:atIndex:",
    "setBytes:length:atIndex:",
    "setThreadgroupMemoryLength:atIndex:",
    "dispatchThreads:threadsPerThreadgroup:",
    "dispatchThreadgroups:threadsPerThreadgroup:",
}
OTHERS = {
    "UTF8String",
    "localizedDescription",
    "maxTotalThreadsPerThreadgroup",
    "new",
    "newComputePipelineStateWithFunction:error:",
    "newFunctionWithName:constantValues:error:",
    "newLibraryWithData:error:",
    "newLibraryWithSource:options:error:",
    "respondsToSelector:",
    "setConstantValues:type:withRange:",
    "setFastMathEnabled:",
    "setLanguageVersion:",
    "setMathFloatingPointFunctions:",
    "setMathMode:",
    "stringWithUTF8String:",
    "threadExecutionWidth",
}


def test_the_host_code_sends_only_known_messages(host):
    assert macos.selectors(host) <= ENCODER | OTHERS


@pytest.mark.parametrize("chosen", [None, "15.0"])
def test_the_build_is_for_macos_14_if_nothing_else_is_chosen(chosen, monkeypatch):
    """The wheel's platform follows from MACOSX_DEPLOYMENT_TARGET."""
    given = {} if chosen is None else {"MACOSX_DEPLOYMENT_TARGET": chosen}
    monkeypatch.setattr(os, "environ", given | {"TORCH_ROPE_CUDA": "0"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "platform", "darwin")
    built = []
    monkeypatch.setattr(setuptools, "setup", lambda **options: built.append(os.environ["MACOSX_DEPLOYMENT_TARGET"]))
    monkeypatch.setattr("shutil.which", lambda name, **_: name if name == "c++" else None)  # no xcrun
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert built == [chosen or "14.0"]
