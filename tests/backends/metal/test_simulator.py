"""Tests of the simulated mps device itself: it reports each mistake of a shader and of host code.

make exhaustive runs them with every order of threads. They need --simulate.
"""

import re
from pathlib import Path

import pytest
import torch
from backends.metal.simulator import metal

# ruff: noqa: E501


pytestmark = pytest.mark.simulator


@pytest.fixture(autouse=True)
def _nothing_bound():
    torch.mps.synchronize()  # ends the encoder and with it all bindings, as a copy to the host does


def launch(source, kernel, *tensors, n=64, grid=(64, 1, 1), group=(32, 1, 1), shared=128, constants=(1,)):
    """Runs a kernel, and returns the first tensor as a list. The other buffers are the tensors, and n unless it is negative."""
    torch.ops.simulator_test.launch(source, tensors, len(tensors), n, grid, group, shared, constants, kernel)
    return tensors[0].tolist()


def numbers(n=64):
    return torch.arange(n, dtype=torch.float32, device="mps")


# ---- mistakes of shaders and of launches ----

BUFFERS = "device float* x [[buffer(0)]], constant int& n [[buffer(1)]], threadgroup float* t [[threadgroup(0)]]"
X_AND_Y = "device float* x [[buffer(0)]], device const float* y [[buffer(1)]]"
SOMETIMES_Y = X_AND_Y.replace("(1)", "(1), function_constant(k_has_y)")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup)"


def program(body, expected, buffers=BUFFERS, tensors=1, x=slice(None), **options):
    """Returns a kernel, what x is afterwards or a pattern of the error, and how to launch the kernel.

    The body sees the index of the thread: i in the grid, l in the threadgroup. x holds the numbers 0 to 63 at first.
    """
    if buffers != BUFFERS:
        options = dict(n=-1, shared=0) | options
    return body, expected, buffers, tensors, x, options


PROGRAMS = {
    "right": program(f"t[l] = x[i]; {BARRIER}; x[i] = t[31 - l];", [*range(31, -1, -1), *range(63, 31, -1)]),
    "float16 keeps denormals": program("const half h = half(x[i] * 5.9604645e-8f); x[i] = float(h) * 16777216;", [*range(64)]),
    "denormals become zero": program("x[i] = as_type<float>(int(i) + 1) * 1.5;", [0] * 64),
    "an argument that is left out": program("x[i] = k_has_y ? y[i] : 3;", [3] * 64, SOMETIMES_Y),
    # mistakes of shaders
    "past the end": program("x[i + 1] = 1;", "write of 4 bytes, 0 bytes past the end of an allocation of 256 bytes"),
    "before the start": program("x[int(i) - 1] = 1;", "write of 4 bytes, .*4 bytes before the start of an allocation"),
    "an argument that is not there": program("x[i] = y[i];", "read of 4 bytes through a null pointer", SOMETIMES_Y),
    "a vector": program("x[i] = (*(device float4*)(x + 1))[0];", "misaligned pointer"),
    "bound to be read": program("((device float*)y)[i] = x[i];", "write of memory that is bound to be read", X_AND_Y, 2),
    "two writes": program("x[i / 2] = 1;", "race, two writes"),
    "in place": program("const float a = x[i], b = x[i ^ 1]; x[i] = a + b;", "race, (write after read|read after write)"),
    "no barrier": program("t[l] = x[i]; x[i] = t[l ^ 1];", "race, .* of shared memory"),
    "a barrier for nothing": program("t[l] = x[i]; threadgroup_barrier(mem_flags::mem_none); x[i] = t[l ^ 1];", "race, .* of shared"),
    "a barrier for other memory": program("t[l] = x[i]; threadgroup_barrier(mem_flags::mem_device); x[i] = t[l ^ 1];", "race, .* of shared"),
    "a barrier for threadgroup memory": program(f"x[i] = 1; {BARRIER}; x[i ^ 1] = 2;", "race, two writes of memory"),
    "two barriers": program(f"if (l < 7) {BARRIER};\nelse {BARRIER};", "threadgroup_barrier in line \\d+ of program_source waits for .* line \\d+"),
    "two shuffles": program("if (l < 7) x[i] = simd_shuffle_xor(x[i], 1);\nelse x[i] = simd_shuffle_xor(2 * x[i], 1);", "simd_shuffle_xor in line \\d+ .*which is at simd_shuffle_xor in line \\d+"),
    "too little threadgroup memory": program("t[l + 1] = x[i];", "past the end of the launch's shared memory of 128 bytes"),
    "unsigned": program("const uint a = (i + 1) * 1000000000u; x[i] = a;", "integer overflow in ..*program_source:\\d+"),
    "division": program("x[i] = n / int(i);", "division by zero"),
    "an array": program("float a[4]; for (uint j = 0; j <= l; j++) a[j] = j; x[i] = a[n % 4];", "array index out of range"),
    "a float too large": program("x[i] = int(x[i] * 1e10);", "a float that the integer type does not hold"),
    # mistakes of launches
    "empty grid": program("", "the grid is empty", grid=(64, 0, 1)),
    "empty threadgroup": program("", "the threadgroup is empty", group=(0, 1, 1)),
    "threadgroup": program("", "a threadgroup has 2048 threads but must have at most 1024", group=(64, 4, 8)),
    "axis": program("", "4294967296 threads on an axis", grid=(2**32, 1, 1)),
    "not bound": program("", "buffer 1 is not bound", SOMETIMES_Y, constants=(2,)),
    "left out": program("", "buffer 1 is bound, but the function constants leave it out", SOMETIMES_Y, 2),
    "setBytes for a buffer": program("", "buffer 1 was set by setBytes but must be a real buffer", X_AND_Y.replace("const ", ""), n=1),
    "type of setBytes": program("", "buffer 1 has 4 bytes but must have 8", BUFFERS.replace("int", "long"), n=1, shared=128),
    "offset": program("", "offset 4 of buffer 0 is misaligned", "device float4* x [[buffer(0)]]", x=slice(1, 63)),
    "no threadgroup memory": program("", "threadgroup memory 0 has no length", shared=0),
    "threadgroup memory": program("", "threadgroup memory has 32784 bytes", shared=32784),
    "part of 16 bytes": program("", "must have a multiple of 16", shared=24),
    "constant": program("", "function: .*function constant k_tensors has no value", constants=()),
}  # fmt: skip
LIBRARY = (
    "#include <metal_stdlib>\nusing namespace metal;\nconstant int k_tensors [[function_constant(0)]];\n"
    "constant bool k_more = k_tensors > 1;\nconstant bool k_has_y = k_more && k_tensors < 4;\n"
)
for number, (body, _, buffers, *_) in enumerate(PROGRAMS.values()):
    index = "uint i [[thread_position_in_grid]], uint l [[thread_index_in_threadgroup]]"
    LIBRARY += f"kernel void k{number}({buffers}, {index}) {{\n{body}\n}}\n"


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_mistake_of_a_shader_or_of_a_launch_is_reported(what):
    _, expected, _, tensors, x, options = PROGRAMS[what]
    kernel, given = f"k{[*PROGRAMS].index(what)}", [numbers()[x], numbers()][:tensors]
    if isinstance(expected, list):
        assert launch(LIBRARY, kernel, *given, **options) == expected
        return
    with pytest.raises(RuntimeError, match=expected):
        launch(LIBRARY, kernel, *given, **options)
    assert launch(LIBRARY, "k0", numbers()) == PROGRAMS["right"][1]  # the mistake has no effect on the next kernel


def test_a_binding_of_an_earlier_kernel_does_not_count():
    x, y = numbers(), numbers()

    def reads_y(*tensors):
        kernel = f"k{[*PROGRAMS].index('not bound')}"
        torch.ops.simulator_test.launch(LIBRARY, tensors, len(tensors), -1, [64, 1, 1], [32, 1, 1], 0, [2], kernel)

    reads_y(x, y)
    with pytest.raises(RuntimeError, match="buffer 1 is left over from an earlier pipeline"):
        reads_y(x)
    torch.mps.synchronize()
    with pytest.raises(RuntimeError, match="buffer 1 is not bound"):
        reads_y(x)


def test_a_kernel_may_limit_its_threadgroups():
    source = (
        LIBRARY + "[[kernel, max_total_threads_per_threadgroup(32)]] void limited(device float* x [[buffer(0)]]) {}\n"
    )
    launch(source, "limited", numbers(), n=-1, shared=0)
    with pytest.raises(RuntimeError, match="a threadgroup has 64 threads but must have at most 32"):
        launch(source, "limited", numbers(), n=-1, shared=0, group=(64, 1, 1))


MISUSES = [
    "commandEncoder.. is used outside of the stream's queue",
    "a deadlock",
    "an exception left a block of dispatch_sync.*boom",
    "setBuffer is used outside of the stream's queue",
    "endEncoding",
    "commits or waits",
    "setBytes got 5000 bytes",
    "setBytes got 0 bytes",
    "setBuffer got nil",
    "offset 20 is past the end of buffer 0",
    "rethrown",
]


@pytest.mark.parametrize("which", range(len(MISUSES)), ids=MISUSES)
def test_a_misuse_of_metal_by_the_host_is_reported(which):
    with pytest.raises(RuntimeError, match=MISUSES[which]):
        torch.ops.simulator_test.misuse(numbers(4), which)
    assert launch(LIBRARY, "k0", numbers()) == PROGRAMS["right"][1]


# ---- texts that are not Metal ----


def test_the_host_gets_the_compiler_s_message():
    source = "kernel void k(device float* x [[buffer(0)]],\nuint i [[thread_position_in_grid]]) { x[i] = sinn(x[i]); }"
    with pytest.raises(RuntimeError, match="library: (?s:.*)program_source:2.*sinn"):
        launch(source, "k", numbers())
    with pytest.raises(RuntimeError, match="function: .*the library has no function other"):
        launch(LIBRARY, "other", numbers())


# Mistakes, and the same text without the mistake: «wrong|right». The checks of the text find what "has no address space" or
# what "Metal has no", clang's address spaces find the member function, and OpenCL's the rest.
HELPERS = """#include <metal_stdlib>
using namespace metal;
inline float of_device(device const float* p) { return *p; }
inline float of_constant(constant float* p) { return *p; }
inline float of_threadgroup(threadgroup const float* p) { return *p; }
inline float of_thread(thread const float* p) { return *p; }
struct Pair { float a, b; float sum() const { return a + b; } };
template <typename T> struct Holder { T p; };
constant float kTable[2] = {1, 2};
constant int k_number [[function_constant(0)]];
constant bool k_flag = k_number > 1;
"""
SPACES = {"device": "x", "constant": "c", "threadgroup": "t", "thread": "s"}
IN_KERNEL = {
    **{f"x[i] = of_{space}(«{wrong}|{right}»);": f"address space '{other}'" for space, right in SPACES.items() for other, wrong in SPACES.items() if other != space},
    "device float* p = «t|x»;": "threadgroup float",
    "Holder<«constant|device» float*> h = {x};": "'device float",
    "x[i] = *reinterpret_cast<«constant|device» float*>(x);": "reinterpret_cast from 'device float",
    "«n = 1|x[i] = n»;": "read-only|const-qualified",
    "*(«|thread »float*)own = 1;": "`float[*]` has no address space",
    "«|thread »auto& p = own[0]; p = 1;": "`auto& p` has no address space",
    "device float* d = x; device float* «|thread »* p = &d; **p = 1;": "`device float[*] [*] p` has no address space",
    "static «|constant »const float one = 1; x[i] = one;": "static local variable must reside in constant",
    "x[i] = («(device Pair*)x|&pair»)->sum();": "object parameter of type 'const Pair' with an expression of type 'device Pair'",
    "«threadgroup float more[32]|float more[1]»; x[i] = 1;": r"must be a parameter \[\[threadgroup\(0\)\]\]",
    "«double|float» d = x[i]; x[i] = d;": "program_source:14: Metal has no double",
    "x[i] = «std::|»fabs(x[i]);": "no std::",
    "if «constexpr |»(sizeof(int) == 4) x[i] = 1;": "no if constexpr",
    "x[i] = «[](float y) { return y; }(1)|1»;": "no a lambda",
    "x[i] = *«new float|x»;": "no new",
    "bfloat b = «x[i]|bfloat(x[i])»; x[i] = float(b);": "implicit conversion",
    "x[i] = «sin|precise::sqrt»(x[i]);": "use of undeclared identifier 'sin'",
    "x[i] = 1;«// \u00b2|»": "not ASCII",
}  # fmt: skip
OUTSIDE = {
    "«|constant »float outside_a = 1;": "program scope variable must reside in constant",
    "struct OutsideB«: Pair|» { float c; };": "program_source:13: Metal has no base classes",
    "struct OutsideC { «|device »float* p; };": "program_source:.*`float[*] p` has no address space",
    "inline «|device »float* outside_d(device float* p) { return p; }": "`inline float[*] outside_d` has no address space",
    "inline float outside_e(«float p[2]|thread float* p») { return p[0]; }": "`float p.2.` has no address space",
    "inline float outside_f(«|thread »float (&p)[2]) { return p[0]; }": "has no address space",
    "template <typename T> inline T outside_g(«|device »const T* p) { return *p; }": "`const T[*] p` has no address space",
    "typedef «|device »float* OutsideH;": "`float[*] OutsideH` has no address space",
    "#pragma METAL fp «math_mode(fast)|math_mode(safe)»": "Metal has no such pragma",
    "#pragma METAL fp contract(«fast|off»)": "Metal has no such pragma",
    "template <typename T> inline T «rotate|outside_m»(T x, int by) { return x + by; }": "program_source:13: metal_stdlib has the name rotate too",
    "namespace N { inline device float* «select|outside_n»(device float* x) { return x; } }": "metal_stdlib has the name select too",
    "struct «atomic|OutsideO» { float x; };": "metal_stdlib has the name atomic too",
    "namespace A { namespace B {\n«kernel void outside_i(device float* x [[buffer(0)]]) {}|» } }": "program_source:14: kernel outside_i is in namespace A::B, but kernels must be at global scope",
    "kernel void outside_j(uint i [[thread_index_in_«grid|threadgroup»]]) {}": "has no attribute that the simulator knows",
    "kernel void outside_k(device float* x [[buffer(0), function_constant(«k_number|k_flag»)]]) {}": "k_number must be a bool that follows from",
    "kernel void outside_l(«|device »float* x [[buffer(0)]]) {}": "`float[*] x` has no address space",
}  # fmt: skip


@pytest.mark.exhaustive
def test_texts_that_are_not_metal_are_refused(tmp_path):
    def source(which, inside, outside):
        body = "float own[4] = {1}; thread float* s = own; constant float* c = kTable; Pair pair = {1, 2};\n"
        body += "x[i] = pair.sum();" + "".join(f"{{ {text} }}\n" for text in inside)
        text = "\n".join(
            [HELPERS, *outside, f"kernel void k({BUFFERS}, uint i [[thread_position_in_grid]]) {{ {body} }}"]
        )
        return re.sub("«(.*?)[|](.*?)»", lambda found: found[which], text)

    for text, message in (IN_KERNEL | OUTSIDE).items():
        wrong = source(1, [text] * (text in IN_KERNEL), [text] * (text in OUTSIDE))
        with pytest.raises(metal.NotMetal, match=message):
            metal.compiled(wrong, tmp_path, Path("no library is linked"))
    launch(source(2, IN_KERNEL, OUTSIDE), "k", numbers(), grid=(1, 1, 1))
