"""Tests of the simulated mps device itself.

Right shaders give right results in every order of threads, and the simulator reports each mistake of a shader or of host
code. These tests need --simulate.
"""

import re
from pathlib import Path

import metal
import pytest
import simulator
import torch

# ruff: noqa: E501


@pytest.fixture(autouse=True)
def _simulated(request):
    if not request.config.getoption("--simulate"):
        pytest.skip("needs --simulate")
    torch.mps.synchronize()
    simulator.last_dispatches()


@pytest.fixture(params=[0, 1, 2], ids=["forward", "backward", "scrambled"])
def _any_order(request):
    simulator.thread_order(request.param)
    yield
    simulator.thread_order(0)


START = "#include <metal_stdlib>\nusing namespace metal;\n"
SHARED = "threadgroup float* t [[threadgroup(0)]]"


def kernel(body, parameters="", before=""):
    """Returns the source of a kernel k with this body.

    The body sees the floats x, their number n, and the index of the thread: i in the grid, l in the threadgroup.
    """
    return (
        f"{START}{before}kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]],"
        " uint i [[thread_position_in_grid]], uint l [[thread_position_in_threadgroup]]"
        f"{', ' * bool(parameters)}{parameters}) {{\n{body}\n}}"
    )


def constant(name, index=0):
    return f"constant int {name} [[function_constant({index})]];\n"


def one_of(bodies, *parameters):
    """Returns the source of one kernel, which has the body whose number is the function constant. So all compile at once."""
    cases = "\n".join(f"if (k_case == {i}) {{ {body} }}" for i, body in enumerate(bodies))
    return kernel(cases, *parameters, before=constant("k_case"))


def launch(source, *tensors, bound=None, n=None, grid=(64, 1, 1), group=(32, 1, 1), shared=0, constants=()):
    """Runs the kernel k of the source and returns the first tensor on the CPU."""
    bound = len(tensors) if bound is None else bound
    n = tensors[0].numel() if n is None else n
    torch.ops.simulator_test.launch(source, tensors, bound, n, grid, group, shared, constants)
    return tensors[0].cpu()


def numbers(n=64):
    return torch.arange(n, dtype=torch.float32, device="mps")


def recorded():
    (done,) = simulator.last_dispatches()
    return done


# ---- right shaders ----


def test_a_kernel_gives_its_result_and_is_recorded(_any_order):
    source = kernel("if (int(i) < n) x[i] = 2 * x[i] + float(kTwo);", "", constant("kOne") + constant("kTwo", 1))
    assert torch.equal(launch(source, numbers(), constants=(5, 7)), 2 * torch.arange(64.0) + 7)
    done = recorded()
    assert done["kernel"] == "k" and done["threads"] == [64, 1, 1] and done["group"] == [32, 1, 1]
    assert done["groups"] == [2, 1, 1] and done["constants"] == {"kOne": 5, "kTwo": 7} and done["rints"] == 0
    assert done["messages"] == {"setComputePipelineState": 1, "setBuffer": 1, "setBytes": 1, "dispatchThreads": 1}
    x, n = done["buffers"][0], done["buffers"][1]
    assert x["bytes"] == x["bytes_read"] == x["bytes_written"] == 256 and x["loads"] == x["stores"] == {"4": 64}
    assert n["bytes"] == 4 and n["bytes_written"] == 0
    simulator.check_guards()


CONDITIONAL = f"""{START}{constant("k_tensors")}constant bool k_more = k_tensors > 1;
constant bool k_has_y = k_more && k_tensors < 4;
kernel void k(device float* x [[buffer(0)]], device const float* y [[buffer(1), function_constant(k_has_y)]],
              uint i [[thread_position_in_grid]]) {{ x[i] = k_has_y ? y[i] : 3; }}"""


def test_an_argument_that_the_function_constants_leave_out_needs_no_buffer():
    y = numbers() + 5
    for tensors, there in ((3, True), (1, False), (2, True), (4, False)):  # the constants are computed for every launch
        given = (numbers(), y) if there else (numbers(),)
        result = launch(CONDITIONAL, *given, n=-1, constants=(tensors,))
        assert torch.equal(result, y.cpu() if there else torch.full((64,), 3.0))
        done = recorded()
        assert list(done["buffers"]) == ([0, 1] if there else [0]) and done["constants"] == {"k_tensors": tensors}
    torch.mps.synchronize()
    with pytest.raises(RuntimeError, match="buffer 1 is not bound"):
        launch(CONDITIONAL, numbers(), n=-1, constants=(2,))
    with pytest.raises(RuntimeError, match="buffer 1 is bound, but the function constants leave it out"):
        launch(CONDITIONAL, numbers(), y, n=-1, constants=(1,))
    with pytest.raises(RuntimeError, match="read of 4 bytes through a null pointer"):
        launch(CONDITIONAL.replace("k_has_y ?", "i < 2 ?"), numbers(), n=-1, constants=(1,))


RIGHT = {  # with 70 threads, of which 6 are in the second threadgroup; x is their numbers at first
    "threads exchange values through threadgroup memory": (
        "t[l] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); x[i] = t[size - 1 - l];",
        [*range(63, -1, -1), *range(69, 63, -1)],
    ),
    "a SIMD group need not be full": (
        "x[i] = simd_shuffle(x[i], 3) + 100 * simd_shuffle_xor(x[i], 1) + 0.5 * (lane != l % 32);",
        [i // 32 * 32 + 3 + 100 * (i ^ 1) for i in range(70)],
    ),
    "denormals become zero": ("x[i] = as_type<float>(int(i) + 1) * 1.5;", [0] * 70),
    "constants are float": ("x[i] = select(1.0, 2.0, INFINITY > x[i]) + as_type<float>(0x40000000);", [4] * 70),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_kernel_gives_its_result(what, _any_order):
    parameters = f"{SHARED}, uint lane [[thread_index_in_simdgroup]], uint size [[threads_per_threadgroup]]"
    source, which = one_of([body for body, _ in RIGHT.values()], parameters), [*RIGHT].index(what)
    result = launch(source, numbers(70), grid=(70, 1, 1), group=(64, 1, 1), shared=256, constants=(which,))
    assert result.tolist() == RIGHT[what][1]


def test_a_thread_knows_its_index_in_a_grid_of_three_dimensions(_any_order):
    """No axis of the grid is a multiple of the threadgroup here."""
    source = START + (
        "kernel void k(device int* x [[buffer(0)]], constant int& n [[buffer(1)]], uint3 at [[thread_position_in_grid]],"
        " uint3 of [[threads_per_grid]], uint3 l [[thread_position_in_threadgroup]], uint i [[thread_index_in_threadgroup]],"
        " uint3 g [[threadgroup_position_in_grid]], uint3 size [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],"
        " uint3 groups [[threadgroups_per_grid]]) {\n"
        " const bool right = at.x == 4 * g.x + l.x && at.y == 3 * g.y + l.y && at.z == 2 * g.z + l.z && simd == i / 32"
        " && i == (l.z * size.y + l.y) * size.x + l.x && groups.x == 3 && groups.z == 3;\n"
        " x[(at.z * of.y + at.y) * of.x + at.x] = right; }"
    )
    x = torch.zeros(10 * 4 * 5, dtype=torch.int32, device="mps")
    assert (launch(source, x, grid=(10, 4, 5), group=(4, 3, 2)) == 1).all()


@pytest.mark.parametrize("dtype, name", [(torch.float32, "float"), (torch.float16, "half"), (torch.bfloat16, "bfloat")])
def test_vectors_are_one_access_and_must_be_aligned(dtype, name):
    source = f"""{START}
        template <typename T> [[kernel]] void k(device T* x [[buffer(0)]], constant int& n [[buffer(1)]],
                                                uint i [[thread_position_in_grid]]) {{
          const vec<T, 4> in = *reinterpret_cast<device const vec<T, 4>*>(x + 4 * i);
          float4 f = float4(in) * 2.0f;
          f.xw = f.wx;
          vec<T, 4> out = vec<T, 4>(f);
          out[1] = static_cast<T>(rint(f[1]));
          *reinterpret_cast<device vec<T, 4>*>(x + 4 * i) = out;
        }}
        template [[host_name("k")]] [[kernel]] decltype(k<{name}>) k<{name}>;"""
    x = torch.randn(64).to(dtype)
    expected = 2 * x.view(16, 4)[:, [3, 1, 2, 0]]
    expected[:, 1] = expected[:, 1].round()
    assert torch.equal(launch(source, x.to("mps"), grid=(16, 1, 1), group=(8, 1, 1)), expected.flatten())
    done = recorded()
    size = str(4 * dtype.itemsize)
    assert done["buffers"][0]["loads"] == done["buffers"][0]["stores"] == {size: 16} and done["rints"] == 16
    with pytest.raises(RuntimeError, match="misaligned pointer"):
        launch(source, x.to("mps")[1:], grid=(15, 1, 1), group=(8, 1, 1))


ALIASED = f"""{START}kernel void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {{ const float a = x[i]; y[i] = a + 1; }}"""


def test_lines_of_memory_are_counted():
    bodies = {  # the lines that are read and written; a SIMD group is 32 threads, and 32 floats are a line
        "y[63 - i] = x[i ^ 32];": (2, 2),
        "y[i] = x[2 * (i % 32)];": (4, 2),
        "y[i] = x[i] + x[i ^ 1];": (4, 2),  # two instructions
        "float sum = 0; for (int j = 0; j < n; j++) sum += x[(i + 32 * j) % 64]; y[i] = sum;": (6, 2),
        "if (i % 4 == 0) *(device float4*)(y + i) = *(device const float4*)(x + i);": (2, 2),
    }
    source, counts = one_of(bodies, "device float* y [[buffer(2)]]").replace("buffer(1)", "buffer(9)"), []
    source = source.replace("buffer(2)", "buffer(1)").replace("buffer(9)", "buffer(2)")
    simulator.count_lines(True)
    try:
        for i in range(len(bodies)):
            launch(source, numbers(), numbers(), n=3, constants=(i,))
            done = recorded()["buffers"]
            counts.append((done[0]["lines_read"], done[1]["lines_written"]))
    finally:
        simulator.count_lines(False)
    assert dict(zip(bodies, counts, strict=True)) == bodies


def test_torch_uses_the_simulated_device():
    x = numbers()
    assert x.device.type == "mps" and torch.backends.mps.is_available()
    assert torch.equal(x.view(8, 8).t().contiguous().cpu(), torch.arange(64.0).view(8, 8).t())
    y = x.clone().requires_grad_()
    (y * y).sum().backward()
    assert torch.equal(y.grad.cpu(), 2 * torch.arange(64.0))
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, dtype=torch.float64, device="mps")
    with torch.library._scoped_library("no_kernel", "DEF") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x, "CPU")
        with pytest.raises(NotImplementedError, match="no_kernel::f"):
            torch.ops.no_kernel.f(x)


def test_an_operator_of_torch_that_works_in_place_keeps_the_strides():
    x = torch.zeros(2, 3).to("mps").t()
    x += torch.arange(6.0).view(3, 2).to("mps")
    assert x.stride() == (1, 3) and torch.equal(x.cpu(), torch.arange(6.0).view(3, 2))


def test_large_buffers_are_sparse(_memory_of_others):
    """A buffer of 4 GiB needs almost no memory."""
    x = torch.empty(2**31, dtype=torch.float16, device="mps")
    source = kernel("x[ulong(i) << 30] = as_type<float>(i);")
    launch_on = torch.ops.simulator_test.launch
    launch_on(source, [x], 1, 0, [1, 1, 1], [1, 1, 1], 0, [])
    assert x[:2].view(torch.int32).item() == 0


# ---- mistakes of shaders ----


def test_writing_a_buffer_that_is_bound_as_const_is_an_error():
    with pytest.raises(RuntimeError, match="bound to be read"):
        launch(ALIASED.replace("y[i] = a + 1", "((device float*)x)[i] = a + 1"), numbers(), numbers())


def test_nil_may_be_bound_for_a_buffer_that_is_not_read():
    source = ALIASED.replace("device const float* x", "device float* x").replace("y[i] = a + 1", "x[i] = n ? y[i] : 3")
    assert (launch(source, numbers(), numbers(0), n=0) == 3).all()
    with pytest.raises(RuntimeError, match="read of 4 bytes through a null pointer"):
        launch(source, numbers(), numbers(0), n=1)


BAD = {
    "past the end": ("x[i + 1] = 1;", "write of 4 bytes, 0 bytes past the end of an allocation of 256 bytes"),
    "before the start": ("x[int(i) - 1] = 1;", "write of 4 bytes, .*4 bytes before the start of an allocation of 256 bytes"),
    "far away": ("x[i] = x[1000000000 + i];", "read of 4 bytes of memory that is not a tensor's"),
    "the host's memory": ("x[i] = *(device float*)16;", "null pointer"),
    "two writes": ("x[i / 2] = 1;", "race, two writes"),
    "in place": ("const float a = x[i], b = x[i ^ 1]; x[i] = a + b;", "race, (write after read|read after write)"),
    "one threadgroup and another": ("x[i % 32] += 1;", "race, .*with block .[01], 0, 0., thread .*; block .[01], 0, 0., thread"),
    "no barrier": ("t[l] = x[i]; x[i] = t[l ^ 1];", "race, .* of shared memory"),
    "a barrier for nothing": ("t[l] = x[i]; threadgroup_barrier(mem_flags::mem_none); x[i] = t[l ^ 1];", "race, .* of shared"),
    "a barrier for other memory": ("t[l] = x[i]; threadgroup_barrier(mem_flags::mem_device); x[i] = t[l ^ 1];", "race, .* of shared"),
    "a barrier for threadgroup memory": ("x[i] = 1; threadgroup_barrier(mem_flags::mem_threadgroup); x[i ^ 1] = 2;", "race, two writes of memory"),
    "left early": ("if (l < 7) return; threadgroup_barrier(mem_flags::mem_threadgroup); x[i] = 0;", "leaves? the kernel|have left"),
    "two barriers": ("if (l < 7) threadgroup_barrier(mem_flags::mem_threadgroup);\nelse threadgroup_barrier(mem_flags::mem_threadgroup);", "threadgroup_barrier in line \\d+ of program_source while .* line \\d+"),
    "two shuffles": ("if (l < 7) x[i] = simd_shuffle_xor(x[i], 1);\nelse x[i] = simd_shuffle_xor(2 * x[i], 1);", "simd_shuffle_xor in line \\d+ .*lane \\d+ waits at simd_shuffle_xor in line \\d+"),
    "no shuffle for some": ("if (l < 7) return; x[i] = simd_shuffle_xor(x[i], 1);", "simd_shuffle_xor .*lane \\d+, which has left|leaves the kernel while lane"),
    "too little threadgroup memory": ("t[l + 1] = x[i];", "past the end of the launch's shared memory of 128 bytes"),
    "unsigned": ("const uint a = (i + 1) * 1000000000u; x[i] = a;", "integer overflow in ..*program_source:\\d+"),
    "division": ("x[i] = n / int(i);", "division by zero"),
    "an array": ("float a[4]; for (uint j = 0; j <= l; j++) a[j] = j; x[i] = a[n % 4];", "array index out of range"),
    "a float too large": ("x[i] = int(x[i] * 1e10);", "a float that the integer type does not hold"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_of_a_shader_is_reported(what, _any_order):
    source, which = one_of([body for body, _ in BAD.values()], SHARED), [*BAD].index(what)
    with pytest.raises(RuntimeError, match=BAD[what][1]):
        launch(source, numbers(), shared=128, constants=(which,))
    # The mistake has no effect on the next kernel.
    assert torch.equal(launch(kernel("x[i] = 1;"), numbers()), torch.ones(64))


def test_reaching_another_tensor_is_an_error():
    x, other = numbers(), numbers()
    assert other.sum() == 2016
    source = kernel("device float* p = x; for (ulong at = 0; at < 100000; at++) if (p[at] == -5) p[at] = 0; x[i] = 1;")
    with pytest.raises(RuntimeError, match="read of 4 bytes"):
        launch(source, x)


NOT_METAL = {
    "double": (kernel("double d = x[i]; x[i] = d;"), "program_source:4: Metal has no double"),
    "std": (kernel("x[i] = std::sin(x[i]);"), "no std::"),
    "if constexpr": (kernel("if constexpr (sizeof(int) == 4) x[i] = 1;"), "no if constexpr"),
    "lambda": (kernel("auto f = [&](float y) { return y; }; x[i] = f(1);"), "no a lambda"),
    "new": (kernel("x[i] = *new float;"), "no new"),
    "pragma": (kernel("x[i] = 1;").replace("kernel", "#pragma METAL fp math_mode(safe)\nkernel", 1), "program_source:3: Metal has no such pragma"),
    "ASCII": (kernel("// \u00b2"), "not ASCII"),
    "a float becomes a bfloat": (kernel("bfloat b = x[i]; x[i] = float(b);"), "implicit conversion"),
    "a kernel in a namespace": (kernel("x[i] = 1;").replace("kernel", "namespace A { inline float f() { return 1; } namespace B {\nkernel", 1) + "}}", "program_source:4: kernel k is in namespace A::B, but kernels must be at global scope"),
    "unknown attribute": (kernel("x[i] = 1;", "uint y [[thread_index_in_grid]]"), "has no attribute that the simulator knows"),
    "a constant that is no bool": (kernel("x[i] = 1;", "device float* y [[buffer(2), function_constant(k0)]]").replace("kernel", "constant int k0 [[function_constant(0)]];\nkernel", 1), "k0 must be a bool that follows from"),
    "a kernel's pointer": (kernel("x[i] = 1;", "float* y [[buffer(2)]]"), "`float[*] y` has no address space"),
    "a variable in threadgroup memory": (kernel("threadgroup float t[32]; x[i] = 1;"), r"must be a parameter \[\[threadgroup\(0\)\]\]"),
}  # fmt: skip


def refusal(source, folder):
    """Returns why the simulator refuses the source."""
    with pytest.raises(metal.NotMetal) as refused:
        metal.compiled(source, folder, Path("no library is linked"), fast_math=False)
    return str(refused.value)


@pytest.mark.parametrize("what", NOT_METAL)
def test_a_shader_that_is_not_metal_does_not_compile(what, tmp_path):
    source, message = NOT_METAL[what]
    assert re.search(message, refusal(source, tmp_path))


def test_the_host_gets_the_compiler_s_message():
    with pytest.raises(RuntimeError, match="library: (?s:.*)program_source:4.*sinn"):
        launch(kernel("x[i] = sinn(x[i]);"), numbers())


# Mistakes, and the same text without the mistake: «wrong|right». The checks of the text find what "has no address space" or
# what "Metal has no", clang's address spaces find the member function, and OpenCL's the rest.
SPACES = {"d": "device", "c": "constant", "g": "threadgroup", "t": "thread"}
HELPERS = """
inline float of_d(device const float* p) { return *p; }
inline float of_c(constant float* p) { return *p; }
inline float of_g(threadgroup const float* p) { return *p; }
inline float of_t(thread const float* p) { return *p; }
inline void write(device float* p) { *p = 1; }
struct Pair { float a, b; float sum() const { return a + b; } };
template <typename T> struct Holder { T p; };
constant float kTable[2] = {1, 2};
"""
IN_KERNEL = {
    **{f"x[i] = of_{to}(«{of}|{to}»);": f"address space '{SPACES[of]}'" for to in SPACES for of in SPACES if of != to},
    "write(«r|d»);": "const device float",
    "device float* p = «g|d»;": "threadgroup float",
    "d = «g|d + 1»;": "assigning 'threadgroup float",
    "Holder<«constant|device» float*> h = {d};": "'device float",
    "x[i] = *reinterpret_cast<«constant|device» float*>(d);": "reinterpret_cast from 'device float",
    "«n = 1|x[i] = n»;": "read-only|const-qualified",
    "*(«|thread »float*)t = 1;": "`float[*]` has no address space",
    "«|thread »float* p = own; *p = 1;": "`float[*] p` has no address space",
    "«|thread »auto& p = own[0]; p = 1;": "`auto& p` has no address space",
    "device float* «|thread »* p = &d; **p = 1;": "`device float[*] [*] p` has no address space",
    "static «|constant »const float s = 1; x[i] = s;": "static local variable must reside in constant",
    "x[i] = («(device Pair*)d|&pair»)->sum();": "object parameter of type 'const Pair' with an expression of type 'device Pair'",
}  # fmt: skip
OUTSIDE = {
    "«|constant »float outside_a = 1;": "program scope variable must reside in constant",
    "struct OutsideG«: Pair|» { float c; };": "program_source:.*Metal has no base classes",
    "struct OutsideH { «|device »float* p; };": "program_source:.*`float[*] p` has no address space",
    "inline «|device »float* outside_j(device float* p) { return p; }": "`inline float[*] outside_j` has no address space",
    "inline float outside_l(«float p[2]|thread float* p») { return p[0]; }": "`float p.2.` has no address space",
    "inline float outside_m(«|thread »float (&p)[2]) { return p[0]; }": "has no address space",
    "template <typename T> inline T outside_n(«|device »const T* p) { return *p; }": "`const T[*] p` has no address space",
    "typedef «|device »float* OutsideP;": "`float[*] OutsideP` has no address space",
}  # fmt: skip


@pytest.mark.exhaustive
def test_mistakes_of_address_spaces_are_refused(tmp_path):
    def source(inside, outside):
        body = "float own[4] = {1}; thread float* t = own; Pair pair = {1, 2}; x[i] = pair.sum() + *t;\n" + inside
        parameters = "constant float* c [[buffer(2)]], device const float* r [[buffer(3)]], threadgroup float* g [[threadgroup(0)]]"
        text = kernel("device float* d = x;" + body, parameters)
        return text.replace("kernel", HELPERS + outside + "\nkernel", 1)

    def version(text, which):
        return re.sub("«(.*?)[|](.*?)»", lambda found: found[which], text)

    for text, message in (IN_KERNEL | OUTSIDE).items():
        wrong = version(text, 1)
        given = refusal(source(wrong, "") if text in IN_KERNEL else source("", wrong), tmp_path)
        assert re.search(message, given), f"{wrong}: {given}"
    right = [version(f"{{ {text} }}", 2) for text in IN_KERNEL]
    launch(
        source("if (i > 64) {" + "\n".join(right) + "}", "\n".join(version(text, 2) for text in OUTSIDE)),
        *(numbers(), torch.ones((), dtype=torch.int32, device="mps"), numbers(), numbers()),
        n=-1,
        shared=128,
    )


# ---- mistakes of the host ----


CONSTANT = kernel("x[i] = k0;", before=constant("k0"))
TYPED = kernel("x[i] = 1;", "device const float4* y [[buffer(2)]]").replace("buffer(1)", "buffer(3)")
LIMITS = {
    "empty grid": (dict(grid=(64, 0, 1)), "the grid is empty"),
    "empty threadgroup": (dict(group=(0, 1, 1)), "the threadgroup is empty"),
    "threadgroup": (dict(group=(64, 4, 8)), "a threadgroup has 2048 threads but must have at most 1024"),
    "axis": (dict(grid=(2**32, 1, 1)), "4294967296 threads on an axis"),
    "unbound": (dict(source=kernel("x[i] = 1;", "device float* y [[buffer(2)]]")), "buffer 2 is not bound"),
    "type of setBytes": (dict(source=kernel("x[i] = n;").replace("int&", "long&")), "buffer 1 has 4 bytes but must have 8"),
    "offset": (dict(source=TYPED.replace("(0)", "(5)").replace("(2)", "(0)").replace("(3)", "(1)").replace("(5)", "(0)"), x=slice(1, 63)), "offset 4 of buffer 0 is misaligned"),
    "no threadgroup memory": (dict(source=kernel("t[l] = 1;", SHARED)), "threadgroup memory 0 has no length"),
    "threadgroup memory": (dict(source=kernel("t[l] = 1;", SHARED), shared=32784), "threadgroup memory has 32784 bytes"),
    "part of 16 bytes": (dict(source=kernel("t[l] = 1;", SHARED), shared=24), "must have a multiple of 16"),
    "constant": (dict(source=CONSTANT), "function: .*function constant k0 has no value"),
    "type of a constant": (dict(source=CONSTANT.replace("constant int k0", "constant bool k0"), constants=[1]), "function constant k0 has another type"),
    "name": (dict(source=kernel("x[i] = 1;").replace("void k(", "void other(")), "the library has no function k"),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_a_launch_beyond_a_limit_of_metal_is_refused(what):
    arguments, message = LIMITS[what]
    arguments = dict(source=kernel("x[i] = 1;"), x=slice(None)) | arguments
    with pytest.raises(RuntimeError, match=message):
        launch(arguments.pop("source"), numbers()[arguments.pop("x")], **arguments)


def test_a_binding_of_an_earlier_kernel_does_not_count():
    x, y = numbers(), numbers()
    torch.mps.synchronize()  # ends the encoder and with it all bindings, as a copy to the host does
    torch.ops.simulator_test.launch(ALIASED, [x, y], 2, 64, [64, 1, 1], [32, 1, 1], 0, [])
    with pytest.raises(RuntimeError, match="buffer 2 is left over from an earlier pipeline"):
        torch.ops.simulator_test.launch(ALIASED, [x, y], 2, -1, [64, 1, 1], [32, 1, 1], 0, [])
    torch.mps.synchronize()
    with pytest.raises(RuntimeError, match="buffer 2 is not bound"):
        torch.ops.simulator_test.launch(ALIASED, [x, y], 2, -1, [64, 1, 1], [32, 1, 1], 0, [])


MISUSES = [
    "commandEncoder.. is used outside of the stream's queue",
    "a deadlock",
    "an exception left a block of dispatch_sync.*boom",
    "endEncoding",
    "commits or waits",
    "commit was sent to the command buffer",
    "setBytes got 5000 bytes",
    "setBytes got 0 bytes",
    "offset 20 is past the end of buffer 0",
    "threadgroup memory has 24 bytes",
    "rethrown",
    "a command encoder is used outside of the stream's queue",
]


@pytest.mark.parametrize("which", range(len(MISUSES)), ids=MISUSES)
def test_a_misuse_of_metal_by_the_host_is_reported(which):
    with pytest.raises(RuntimeError, match=MISUSES[which]):
        torch.ops.simulator_test.misuse(numbers(4), which)
    assert torch.equal(launch(kernel("x[i] = 1;"), numbers()), torch.ones(64))


def test_a_compiled_library_is_loaded():
    assert torch.equal(launch("SIMULATED" + kernel("x[i] = 1;"), numbers()), torch.ones(64))
    with pytest.raises(RuntimeError, match="library: .*no Metal library"):
        launch("SIMULATEx", numbers())
