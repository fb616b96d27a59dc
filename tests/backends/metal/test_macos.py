"""The library compiles for macOS (arm64), and links with the oldest and the newest release of torch for it."""

import importlib.util
import sys

import macos
import pytest
from cases import missing

# In one group, as a second worker would wait for the first one's compiler.
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("macos")]


@pytest.fixture(autouse=True)
def _tools():
    if sys.platform != "linux":
        pytest.skip("macOS has the real thing")
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


def test_only_known_symbols_are_taken_from_torch(release, objects):
    unknown = macos.from_torch(objects) - macos.listed(release)
    assert not unknown, "not known to be in torch for macOS; look with: python tests/backends/metal/macos.py --update"


def test_links(release, objects, libraries):
    macos.link(release, objects)


@pytest.mark.parametrize("release", [max(macos.RELEASES)])
def test_misspelt_symbol_is_refused(release, objects, host, libraries):
    """Declared and used under a wrong name it compiles, and must not link."""
    (misspelt,) = macos.compile(release, [macos.HOST], misspelt="getCurrentMPSStream")
    others = [path for path in objects if path != host]
    with pytest.raises(RuntimeError, match="undefined symbol: .*getCurrentMPSStreams"):
        macos.link(release, [misspelt, *others])


def test_little_of_mps_is_used(objects):
    """Nothing whose layout or namespace differs between releases."""
    assert {name for name in macos.from_torch(objects) if "3mps" in name} == {
        "__ZN2at3mps19getCurrentMPSStreamEv",
        "__ZN2at3mps9MPSDevice11getInstanceEv",
        "__ZN2at3mps9MPSStream14commandEncoderEv",
    }


# All that torch records when it captures a graph, and nothing that ends its encoder or waits.
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


def test_messages(host):
    assert macos.selectors(host) <= ENCODER | OTHERS
