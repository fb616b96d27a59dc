"""Compiles shaders in the Metal Shading Language 3.1 as C++, for the grid emulator.

    python metal.py FOLDER LIBRARY < SOURCE

Prints the path of the compiled library, which is in FOLDER and uses the emulator in LIBRARY. If the source is wrong, it
says what is wrong and fails. It rewrites only what C++ cannot express: attributes of kernels, instantiations with a
host_name, function constants, copies of structs to another address space, and vector constructors.

If TORCH_ROPE_SIMULATOR_CONTRACT is 1, the compiler may fuse multiplications and additions, as a GPU's compiler does.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The names of functions and types of metal_stdlib, from the Metal Shading Language Specification. A shader must not give
# them to its own. It can call only those that shim.h defines.
STDLIB = str.split("""
abs absdiff acos acosh addsat all any as_type asin asinh atan atan2 atanh atomic_compare_exchange_weak_explicit
atomic_exchange_explicit atomic_fetch_add_explicit atomic_fetch_and_explicit atomic_fetch_max_explicit
atomic_fetch_min_explicit atomic_fetch_or_explicit atomic_fetch_sub_explicit atomic_fetch_xor_explicit
atomic_load_explicit atomic_store_explicit atomic_thread_fence ceil clamp clz copysign cos cosh cospi cross ctz
determinant dfdx dfdy discard_fragment distance distance_squared divide dot exp exp10 exp2 extract_bits fabs
faceforward fdim floor fma fmax fmax3 fmedian3 fmin fmin3 fmod fract frexp fwidth hadd ilogb insert_bits isfinite
isinf isnan isnormal isordered isunordered ldexp length length_squared log log10 log2 mad24 madhi madsat
make_filled_simdgroup_matrix max max3 median3 min min3 mix modf mul24 mulhi nextafter normalize popcount pow powr
quad_active_threads_mask quad_all quad_and quad_any quad_ballot quad_broadcast quad_broadcast_first quad_is_first
quad_is_helper_thread quad_max quad_min quad_or quad_prefix_exclusive_product quad_prefix_exclusive_sum
quad_prefix_inclusive_product quad_prefix_inclusive_sum quad_product quad_shuffle quad_shuffle_and_fill_down
quad_shuffle_and_fill_up quad_shuffle_down quad_shuffle_rotate_down quad_shuffle_rotate_up quad_shuffle_up
quad_shuffle_xor quad_sum quad_xor reflect refract reverse_bits rhadd rint rotate round rsqrt saturate select sign
signbit simd_active_threads_mask simd_all simd_and simd_any simd_ballot simd_broadcast simd_broadcast_first
simd_is_first simd_is_helper_thread simd_max simd_min simd_or simd_prefix_exclusive_product
simd_prefix_exclusive_sum simd_prefix_inclusive_product simd_prefix_inclusive_sum simd_product simd_shuffle
simd_shuffle_and_fill_down simd_shuffle_and_fill_up simd_shuffle_down simd_shuffle_rotate_down
simd_shuffle_rotate_up simd_shuffle_up simd_shuffle_xor simd_sum simd_xor simdgroup_barrier simdgroup_load
simdgroup_multiply simdgroup_multiply_accumulate simdgroup_store sin sincos sinh sinpi smoothstep sqrt step subsat
tan tanh tanpi threadgroup_barrier transpose trunc
array atomic conditional enable_if imageblock integral_constant is_same make_signed make_unsigned numeric_limits
simdgroup_matrix texture1d texture2d texture3d texture_buffer texturecube
""")
ATTRIBUTES = set(re.findall(r"^  k(\w+),$", (HERE / "library.h").read_text(), re.M))
LIMIT = r"max_total_threads_per_threadgroup\(([\w:]+)\)"
VECTOR = r"\b(?:metal::)?((?:float|half|bfloat|u?char|u?short|u?int|u?long)[234]|vec<\s*\w+\s*,\s*\w+\s*>)\s*\("
# Features that Metal lacks. C++14 has them, or clang accepts them although C++14 has not.
NOT_METAL = {
    **{word: rf"\b{word}\b" for word in ("double", "new", "delete", "virtual", "throw", "try", "goto", "thread_local")},
    "std::": r"\bstd::",
    "if constexpr": r"\bif\s+constexpr\b",
    "base classes": r"(?<!enum )\b(?:struct|class)\s+\w+\s*(?:<[^{};]*>)?\s*:(?!:)",
    "such pragma": r"^#\s*pragma\s+METAL\b(?!\s+fp\s+(?:contract\(off\)|math_mode\(safe\))\s*$).*",
    "a lambda": r"\[\s*[&=]?[\w\s,&]*\]\s*\([^()]*\)\s*(?:->\s*[\w:<>]+\s*)?\{",
}


class NotMetal(Exception):
    """The source is not a shader that Metal accepts; the message says why."""


def closing(text: str, at: int) -> int:
    """Returns the index of the bracket that closes the bracket at text[at]."""
    pairs = {"(": ")", "{": "}"}
    opening, depth = text[at], 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == pairs[opening])
        if not depth:
            return i
    raise NotMetal(f"a {opening} has no closing bracket")


def arguments(text: str) -> list[str]:
    """Splits the text at the commas that are outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def types_of(text: str) -> str:
    """Returns a pattern for a type of a declaration, without pointers."""
    names = re.findall(r"\b(?:struct|class|enum|typename)\s+(?!class\b)(\w+)", text)
    names += re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", text) + re.findall(r"\busing\s+(\w+)\s*=", text)
    plain = r"auto|void|bool|(?:float|half|bfloat|u?char|u?short|u?int|u?long)[234]?|unsigned|signed|size_t|vec"
    some = rf"(?:{'|'.join([plain, *sorted(set(names))])})"
    template = r"(?:\s*<(?:[^<>;{}()]|<[^<>;{}()]*>)*>)?"
    return rf"(?:\w+::)*\b{some}(?:\s+{some})*\b{template}(?:::\w+\b)?"


def check(text: str) -> None:
    """Raises NotMetal if the preprocessed text uses what Metal lacks."""

    def refuse(at: int, why: str) -> None:
        before = text[:at].split("\n")
        marker = max(i for i, line in enumerate(before) if line.startswith("# "))  # has the number of the next line
        line = int(before[marker].split()[1]) + len(before) - marker - 2
        raise NotMetal(f"program_source:{line}: {why}")

    for name, pattern in NOT_METAL.items():
        if found := re.search(pattern, text, re.M):
            refuse(found.start(), f"Metal has no {name}")
    scopes = []  # the names of namespaces, and None for other braces
    for found in re.finditer(r"(?:\bnamespace\b\s*([\w:]*)\s*)?\{|\}|\bkernel\b", text):
        if found[0] == "kernel":
            if namespaces := [name for name in scopes if name is not None]:
                name = re.compile(rf"(?:\W|{LIMIT})*(?:void|decltype\W)\s*([\w:]+)").match(text, found.end())
                where = f"in namespace {'::'.join(namespaces)}, but kernels must be at global scope"
                refuse(found.start(), f"kernel {name[2] if name else ''} is {where}, where the host finds their names")
        elif found[0] == "}":
            del scopes[-1:]
        else:
            scopes.append(found[1])
    # The compilers would take a pointer without an address space for one to any, or to private memory.
    plain = re.sub(r"^#.*$", lambda line: " " * len(line[0]), text, flags=re.M)
    space, kind = r"\b(?:device|constant|threadgroup|thread)\b", types_of(plain)
    words = rf"(?:\s|\b(?:const|volatile|static|inline|constexpr)\b|{space})*"
    pointer = rf"({words}){kind}({words})(?:((?:[*&]{words})+)|\({words}[*&]\s*\w*\s*\)\s*[\[(])\w*"
    for found in re.finditer(pointer, plain):
        inner = re.split(r"[*&]", found[3] or "")[1:-1]
        if not all(re.search(space, words) for words in [found[1] + found[2], *inner]):
            refuse(found.start(), f"`{found[0].strip()}` has no address space")
    names = "|".join(STDLIB)
    for found in re.finditer(rf"(?:{kind}[\s*&]+(?:{space}\s*)?({names})\s*\()|\bstruct\s+({names})\b", plain):
        refuse(found.start(), f"metal_stdlib has the name {found[1] or found[2]} too")
    for found in re.finditer(rf"[(,]\s*(?:const\s+)?{kind}\s+\w+\s*\[[^\[\]]*\]\s*(?=[,)])", plain):
        refuse(found.start(), f"`{found[0][1:].strip()}` has no address space")


def translated(text: str) -> str:
    """Returns preprocessed Metal as C++."""
    check(text)
    # Constants and kernels are registered right after their definition, where their names are known.
    known = {}  # the types of the function constants, and of the constants that are computed from them

    def defined(found: re.Match) -> str:
        kind, name, index, value = found.groups()
        if index is None and not known.keys() & set(re.findall(r"\w+", value)):
            return found[0]
        known[name] = kind
        if index is None:
            return f"VARIABLE({kind}, {name}); DERIVED({name}, {value});"
        return f"VARIABLE({kind}, {name}); CONSTANT({name}, {index});"

    index = r"\[\[\s*function_constant\((\w+)\)\s*\]\]"
    constant = rf"(?:\bstatic\s+)?\bconstant\s+(\w+)\s+(\w+)\s*(?:{index}|=([^;]+));"
    text = re.sub(constant, defined, text)

    attributes_of, count = {}, itertools.count()
    kernel = rf"(?:\[\[\s*kernel\s*(?:,\s*{LIMIT}\s*)?\]\]|\bkernel\b)\s+void\s+(\w+)\s*\("
    while found := re.search(kernel, text):
        limit, name, end = found[1] or 1024, found[2], closing(text, found.end() - 1)
        parameters, attributes = arguments(text[found.end() : end]), []
        for i, parameter in enumerate(parameters):
            declared, *lists = re.split(r"\[\[(.*?)\]\]", parameter, flags=re.S)
            given = dict(re.findall(r"(\w+)\s*(?:\(\s*([\w:]+)\s*\))?", ",".join(lists[::2])))
            present = given.pop("function_constant", "")
            attribute, index = given.popitem() if len(given) == 1 else ("", "")
            if attribute not in ATTRIBUTES or (present and attribute != "buffer"):
                raise NotMetal(f"kernel {name}: `{parameter}` has no attribute that the simulator knows")
            if attribute in ("buffer", "threadgroup") and not re.search(r"\b(device|constant|threadgroup)\b", declared):
                raise NotMetal(f"kernel {name}: `{parameter}` has no address space")
            if present and known.get(present.split("::")[-1]) != "bool":
                raise NotMetal(f"kernel {name}: {present} must be a bool that follows from the function constants")
            attributes.append(f"{{simulator::k{attribute}, {index or 0}, {f'&{present}' if present else 'nullptr'}}}")
            # Metal's compiler assumes that buffers do not overlap, so the optimiser may assume it here.
            parameters[i] = re.sub(r"([*&])\s*(\w+)\s*$", r"\1 __restrict \2", declared)
        attributes_of[name] = f"{limit}, LIST({', '.join(attributes)})"
        after = closing(text, text.index("{", end)) + 1
        plain = not re.search(r"template\s*<[^;{}]*>\s*$", text[: found.start()])
        registered = f' KERNEL({next(count)}, "{name}", {attributes_of[name]}, {name});' if plain else ""
        lines = "\n" * text[found.start() : end].count("\n")
        head = f"void {name}({', '.join(parameters)}{lines}{text[end:after]}{registered}"
        text = text[: found.start()] + head + text[after:]

    instance = r'template\s*\[\[\s*host_name\(((?:\s*"[^"]*")+)\s*\)\s*\]\]\s*\[\[\s*kernel\s*\]\]\s*decltype\('
    while found := re.search(instance, text):
        end = closing(text, found.end() - 1)
        function = text[found.end() : end].strip()
        attributes = attributes_of[re.match(r"[\w:]*?(\w+)\s*(?:<|$)", function)[1]]
        made = f"INSTANCE({next(count)}, {found[1]}, {attributes}, {function});"
        text = text[: found.start()] + made + text[text.index(";", end) + 1 :]

    body = re.sub(r"\bthreadgroup\s+[\w:<>, ]+\s\w+\s*(?:\[[^;]*)?;", lambda m: f"\0{m[0]}", text)
    if "\0" in body:
        variable = body.split("\0")[1].split("\n")[0]
        raise NotMetal(f"threadgroup memory must be a parameter [[threadgroup(0)]] in the simulator: {variable}")
    if structs := "|".join(set(re.findall(r"\bstruct\s+(\w+)", text))):
        text = re.sub(rf"\b((?:{structs})\b[^;(){{}}=&*]*\s\w+\s*=\s*)([^;={{}}]+);", r"\1COPY_OF(\2);", text)
    text = re.sub(VECTOR, r"simulator::vector<\1>(", text)

    return text


def run(*command, text: str | None = None) -> str:
    """Runs a compiler and returns its output. Raises NotMetal with its messages if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise NotMetal(done.stderr)
    return done.stdout


@functools.cache
def compiler() -> str | None:
    """Returns the name of a clang whose __bf16 is an arithmetic type, or None."""
    for name in [*(f"clang++-{version}" for version in (19, 20, 21, 22, 18, 17)), "clang++"]:
        if path := shutil.which(name):
            version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True).stdout
            if version and int(version.split(".")[0]) >= 17:
                return name
    return None


def processor() -> list[str]:
    """Returns the compiler flags for the extensions that this processor has and half types need."""
    info = Path("/proc/cpuinfo")
    there = info.read_text().split() if info.exists() else []
    return [f"-m{feature}" for feature in ("fma", "f16c") if feature in there]


LANGUAGE = ["-x", "c++", "-std=c++14", "-Wno-everything", "-Xclang", "-cl-single-precision-constant"]
# A float becomes a bfloat or a double only if the source says so.
STRICT = [
    "-Werror=c++17-extensions",
    "-Werror=double-promotion",
    "-Werror=implicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
]
# OpenCL C++ has Metal's address spaces, and like Metal no variables outside of functions except constants.
OPENCL = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant", "-Wno-everything"]
EXTENSIONS = ["-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space"]
SPACES = {"__global": "device", "__constant": "constant", "__local": "threadgroup", "__private": "thread"}
# A wrap of an unsigned 32-bit integer is an error too: it may be an element offset that does not fit.
CHECKS = "thread,signed-integer-overflow,unsigned-integer-overflow,shift-base,shift-exponent,integer-divide-by-zero,array-bounds,float-cast-overflow,alignment"
FLAGS = (
    "-O2 -g1 -fPIC -shared -fno-vectorize -fno-slp-vectorize -fno-strict-aliasing"
    f" -Xclang -ffloat16-excess-precision=none -Xclang -fsanitize={CHECKS} -Xclang -fsanitize-recover=unsigned-integer-overflow"
    " -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1"
).split()


def compiled(source: str, folder: Path, library: Path) -> Path:
    """Returns the library that is compiled from the source. It is compiled once and kept in the folder."""
    if not source.isascii():
        raise NotMetal("program_source: the source is not ASCII")
    contract = os.environ.get("TORCH_ROPE_SIMULATOR_CONTRACT") == "1"
    flags = [*FLAGS, *processor(), f"-ffp-contract={'fast' if contract else 'off'}"]
    files = [
        HERE / "metal.py",
        HERE / "library.h",
        *sorted(HERE.glob("metal/*.h")),
        HERE / "../../cuda/emulator/grid.h",
    ]
    state = [source, *flags, compiler(), *(file.read_text() for file in files)]
    made = folder / hashlib.sha256("\0".join(state).encode()).hexdigest()[:16]
    if not made.exists():
        preprocess = ["-E", "-x", "c++", "-nostdinc", "-D__METAL_VERSION__=310", "-D__METAL__=1"]
        preprocess += ["-isystem", HERE / "metal", "-"]
        text = run(compiler(), *preprocess, text=f'#line 1 "program_source"\n{source}')
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            cpp = Path(own, "program_source")  # messages of Metal's compiler call the source by this name
            cpp.write_text(translated(text))
            base = [compiler(), f"-I{HERE}", "-include"]
            try:
                if "rope_mutant(" not in text:  # the mistakes of tests/mutants use ?: in ways that OpenCL C++ lacks
                    run(*base, "metal/strict.h", *OPENCL, *EXTENSIONS, "-fsyntax-only", cpp)
            except NotMetal as error:
                raise NotMetal(re.sub("|".join(SPACES), lambda space: SPACES[space[0]], str(error))) from None
            base += ["metal/shim.h", *LANGUAGE]
            run(*base, *STRICT, "-fsyntax-only", *with_constants({}), cpp)
            run(*base, *flags, "-o", Path(own, "library.so"), cpp, "-x", "none", library)
            with contextlib.suppress(OSError):  # another process has compiled it meanwhile
                Path(own).rename(made)
            Path(own).mkdir(exist_ok=True)
    return made / "library.so"


def with_constants(values: dict[int, int]) -> list[str]:
    """Returns the flags for a build with clang's address spaces and with these function constants."""
    all_values = ",".join(str(values.get(i, 0)) for i in range(max(values, default=-1) + 1))
    return ["-DSIMULATOR_ADDRESS_SPACES", f"-DSIMULATOR_VALUES={all_values}"]


def specialised(cpp: Path, values: dict[int, int]) -> str:
    """Returns the optimised LLVM code of a translated source with these function constants.

    Address spaces are 1 for device, 2 for constant and 3 for threadgroup.
    """
    flags = ["-O3", "-emit-llvm", "-S", "-o", "-", "-ffp-contract=off", "-fno-strict-aliasing"]
    flags += ["-fno-vectorize", "-fno-slp-vectorize"]
    base = [compiler(), f"-I{HERE}", "-include", "metal/shim.h", *LANGUAGE, *processor()]
    return run(*base, *with_constants(values), *flags, cpp)


if __name__ == "__main__":
    try:
        print(compiled(sys.stdin.read(), Path(sys.argv[1]), Path(sys.argv[2])))
    except NotMetal as error:
        sys.exit(str(error))
