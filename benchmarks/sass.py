"""Follows one thread through the machine code of a CUDA kernel, as cuobjdump prints it, without a GPU.

Only the integers that addresses and branches depend on are computed; every other value is unknown (None). The result is
the list of the instructions that the thread executes, with the tensor that each load and store accesses.
"""

import operator
import re
import struct
from typing import NamedTuple

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
ADDRESS = re.compile(r"\[(U?R\d+)(?:\.64)?(?:\+(UR\d+))?(?:\+(-?0x[0-9a-f]+))?\]$")
PREDICATE = re.compile(r"!?U?P(\d|T)")
COMPARE = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}
COMBINE = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}
WIDTHS = {"64": 64, "S64": 64, "U64": 64, "128": 128, "256": 256, "U8": 8, "S8": 8, "U16": 16, "S16": 16}


class Instruction(NamedTuple):
    guard: str | None
    op: str
    operands: list[str]


class Step(NamedTuple):
    """An instruction that a thread executed."""

    pc: int
    op: str
    tensor: str | None  # the tensor that a load or store accesses
    uses: frozenset[str]  # the tensors whose loaded values it reads


class Unknown(Exception):
    """A value that the path depends on is not computed."""


def functions(sass: str) -> dict[str, dict[int, Instruction]]:
    """Returns the instructions of each function of cuobjdump's output, as dicts from their addresses."""
    result = {}
    for function in sass.split("Function : ")[1:]:
        code = {
            int(pc, 16): Instruction(guard or None, op, re.split(r",\s*", operands) if operands else [])
            for pc, guard, op, operands in INSTRUCTION.findall(function)
        }
        result[function.split(None, 1)[0]] = code
    return result


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)


def as_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]


def as_word(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


class Thread:
    """One thread. bank: the constant bank with the kernel's parameters; special: the values of special registers;
    load(tensor, address): the 32 bits that a tensor holds at an address, or None; tensor(address): the tensor there."""

    def __init__(self, code, bank: bytes, special: dict[str, int], tensor, load):
        self.code, self.bank, self.special, self.tensor, self.load = code, bank, special, tensor, load
        self.registers = {"RZ": 0, "URZ": 0, "PT": True, "UPT": True, "SRZ": 0}
        self.loaded = {}  # the tensor that a register was loaded from

    def run(self, limit: int = 100_000) -> list[Step]:
        pc, steps = 0, []
        while pc is not None:
            instruction = self.code[pc]
            self.uses = set()
            self.accessed = None
            after = self.step(pc, instruction)
            steps.append(Step(pc, instruction.op, self.accessed, frozenset(self.uses)))
            if len(steps) > limit:
                raise Unknown("the thread does not end")
            pc = after
        return steps

    # ---- values ----

    def register(self, name: str):
        if name in self.loaded:
            self.uses.add(self.loaded[name])
        return self.registers.get(name)

    def value(self, text: str, bits: int = 32) -> int:
        """Returns an operand; raises Unknown if it is not known."""
        text = text.removesuffix(".reuse")
        if PREDICATE.fullmatch(text):
            if (found := self.register(text.lstrip("!"))) is None:
                raise Unknown(text)
            return found != text.startswith("!")
        if text[0] in "-~":
            return (1 << bits) - (text[0] == "~") - self.value(text[1:], bits)
        if constant := re.fullmatch(r"c\[0x0\]\[(?:(\w+)\+)?(\w+)\]", text):
            base, offset = constant.groups()
            if offset[0] != "0":
                base, offset = offset, "0"
            at = int(offset, 16) + (self.value(base) if base else 0)
            return int.from_bytes(self.bank[at : at + bits // 8], "little")
        if register := re.fullmatch(r"(U?R)(\d+)(\.64)?", text):
            kind, number, _ = register.groups()
            words = [self.register(f"{kind}{int(number) + i}") for i in range(max(1, bits // 32))]
            if None in words:
                raise Unknown(text)
            return sum(word << 32 * i for i, word in enumerate(words))
        if text in self.registers:
            return self.registers[text]
        if re.fullmatch(r"0x[0-9a-f]+", text):
            return int(text, 16)
        raise Unknown(text)

    def set(self, name: str, value, bits: int = 32, loaded: str | None = None):
        for i in range(max(1, bits // 32)):
            at = re.sub(r"\d+", lambda found: str(int(found[0]) + i), name)  # noqa: B023
            if at not in ("RZ", "URZ", "PT", "UPT"):
                self.registers[at] = value if value is None or value is True else value >> 32 * i & 0xFFFFFFFF
                self.loaded.pop(at, None)
                if loaded:
                    self.loaded[at] = loaded

    # ---- instructions ----

    def step(self, pc: int, instruction: Instruction) -> int | None:
        """Executes an instruction and returns the address of the next one, or None at the end."""
        guard, op, operands = instruction
        name, *modes = op.split(".")
        try:
            active = self.value(guard) if guard else True
        except Unknown:
            active = None
        if "DIV" in modes:  # taken if the threads of a warp have come apart
            return pc + 16
        if name in ("EXIT", "BRA", "CALL"):
            conditions = [self.value(o) for o in operands if PREDICATE.fullmatch(o)] if active else []
            if active is None:
                raise Unknown(f"{guard} of {op} at {pc:#x}")
            if active and all(conditions):
                if "ABS" in modes:  # a function, such as that of a failed assert; CALL.REL is also used as a jump
                    raise Unknown(f"{op} at {pc:#x}")
                return None if name == "EXIT" else int(operands[-1].strip("`()"), 16)
        elif name in ("BRX", "RET", "JMP"):
            raise Unknown(f"{op} at {pc:#x}")
        elif name in ("LDG", "LD", "STG", "ST"):
            self.access(name, modes, operands, active)
        elif operands and name not in ("BSSY", "BSYNC", "WARPSYNC", "BAR", "NOP"):
            self.assign(name, modes, operands, active)
        return pc + 16

    def access(self, name, modes, operands, active):
        bits = next((WIDTHS[mode] for mode in modes if mode in WIDTHS), 32)
        target, address = operands[:2] if name.startswith("LD") else operands[1::-1]
        base, uniform, offset = ADDRESS.search(address).groups()
        try:
            at = self.value(base, 64) + (self.value(uniform, 64) if uniform else 0) + int(offset or "0", 16)
            self.accessed = self.tensor(at) if active is not False else None
        except Unknown:
            at = self.accessed = None
        if name.startswith("ST"):
            for i in range(max(1, bits // 32)):
                self.register(f"R{int(target[1:]) + i}" if target != "RZ" else target)
        elif active is not False:
            words = [self.load(self.accessed, at + 4 * i) if at else None for i in range(max(1, bits // 32))]
            value = None if None in words or not active else sum(word << 32 * i for i, word in enumerate(words))
            self.set(target, value, bits, self.accessed)

    def assign(self, name, modes, operands, active):
        """Computes the results of an instruction that accesses no memory."""
        name = name.removeprefix("U")
        if name.startswith("VOTE"):
            name, count = "VOTE", len(operands) - 1
        elif name == "PLOP3" or name in ("LOP3", "SHFL") and PREDICATE.fullmatch(operands[0]):
            count = 2
        else:  # a register, and predicates after it
            count = 1
            while count < len(operands) and PREDICATE.fullmatch(operands[count]) and operands[count][0] != "!":
                count += 1
        results, sources = operands[:count], operands[count:]
        bits = 64 if {"64", "WIDE"} & {*modes} or name == "CS2R" and "32" not in modes else 32
        if name in ("LDC", "LDCU"):
            bits = next((WIDTHS[mode] for mode in modes if mode in WIDTHS), 32)
        try:
            values = self.compute(name, modes, results, sources, bits)
        except Unknown:
            for text in sources:  # what they were loaded from
                for register in re.findall(r"\bU?R\d+\b", text):
                    self.register(register)
            values = []
        if active is False:
            return
        registers = [x for x in results if not PREDICATE.fullmatch(x)]
        predicates = [x for x in results if PREDICATE.fullmatch(x)]
        values = values if active else []
        for target in registers:
            self.set(target, values[0] if values else None, bits)
        values = values[1:] if registers else values
        for i, target in enumerate(predicates):
            if target not in ("PT", "UPT"):
                self.registers[target] = values[i] if i < len(values) else None
                self.loaded.pop(target, None)

    def compute(self, name, modes, results, sources, bits) -> list:
        """Returns the value of the result register, if there is one, and those of the predicates after it."""

        def v(i, width=bits):
            return self.value(sources[i], width)

        carries = [self.value(x) for x in sources if PREDICATE.fullmatch(x)]

        def total(value, width=bits):
            value += sum(carries) if "X" in modes else 0
            return [value, value >> width > 0, value >> width > 1]

        def number(i, width=32):
            value = v(i, width) & ((1 << width) - 1)
            return value if {"U32", "U64"} & {*modes} else signed(value, width)

        if name in ("MOV", "R2UR", "LDC", "LDCU"):
            return [v(0)]
        if name == "CS2R":
            return [0]
        if name in ("S2R", "S2UR"):
            return [self.special[sources[0]]]
        if name == "IMAD" and "HI" in modes:
            return [v(0) * v(1) + v(2, 64) >> 32]
        if name == "IMAD":
            if "WIDE" in modes:
                return total(number(0) * number(1) + v(2, 64))
            return total(v(0) * v(1) + v(2))
        if name in ("IADD3", "IADD", "VIADD"):
            return total(sum(v(i) for i, x in enumerate(sources) if not PREDICATE.fullmatch(x)))
        if name == "LEA":
            if "HI" not in modes:
                return total(((v(0) & 0xFFFFFFFF) << v(2) & 0xFFFFFFFF) + v(1))
            low = v(0) & 0xFFFFFFFF
            high, shift = (signed(low, 32) >> 32, v(2)) if "SX32" in modes else (v(2), v(3))
            return total(((high << 32 | low) << shift >> 32 & 0xFFFFFFFF) + v(1))
        if name == "SHF":
            low, shift, high = v(0, 32) & 0xFFFFFFFF, v(1, 32), v(2, 32) & 0xFFFFFFFF
            both = high << 32 | low
            both = signed(both, 64) if {"S32", "S64"} & {*modes} else both
            if "L" in modes:
                return [both << shift >> 32 if "HI" in modes else low << shift]
            return [both >> shift >> 32 if "HI" in modes else both >> shift]
        if name == "SEL":
            return [v(0) if carries[-1] else v(1)]
        if name in ("VIMNMX", "IMNMX", "VIADDMNMX"):
            width = 64 if {"S64", "U64"} & {*modes} else 32
            first = number(0, width)
            if name == "VIADDMNMX":
                first, second = signed(first + number(1), 32), number(2)
            else:
                second = number(1, width)
            return [(min if carries[-1] else max)(first, second)]
        if name == "ISETP":
            width = 64 if {"S64", "U64"} & {*modes} else 32
            a, b, compare = number(0, width), number(1, width), next(m for m in modes if m in COMPARE)
            holds = COMPARE[compare](a, b)
            if "EX" in modes:
                if compare in ("EQ", "NE"):
                    holds = holds and carries[1] if compare == "EQ" else holds or carries[1]
                elif a == b:
                    holds = carries[1]
            combine = COMBINE[next(m for m in modes if m in COMBINE)]
            return [combine(holds, carries[0]), combine(not holds, carries[0])]
        if name == "FSETP":  # of parameters
            a, b = (float(x) if re.fullmatch(r"-?[\d.e+-]+", x) else as_float(self.value(x)) for x in sources[:2])
            compare = COMPARE[next(m for m in modes if m.removesuffix("U") in COMPARE).removesuffix("U")]
            return [compare(a, b) and carries[0], not compare(a, b) and carries[0]]
        if name == "P2R" and not modes:
            return [sum(self.value(f"P{i}") << i for i in range(7) if v(2) >> i & 1) | v(1)]
        if name == "PRMT":
            data, select = (v(0) & 0xFFFFFFFF) | (v(2) & 0xFFFFFFFF) << 32, v(1)
            value = 0
            for i in range(4):
                nibble = select >> 4 * i & 15
                byte = data >> 8 * (nibble & 7) & 255
                value |= (byte >> 7) * 255 << 8 * i if nibble & 8 else byte << 8 * i
            return [value]
        if name == "LOP3":
            a, b, c, table = (v(i) for i in range(4))
            value = 0
            for i in range(8):
                if table >> i & 1:
                    value |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            value &= 0xFFFFFFFF
            return [value, value != 0 or carries[-1]]
        if name == "VOTE":  # the other threads of the warp say the same
            return [-int(carries[0]), carries[0]] if "R" in results[0] else [carries[0]]
        if name == "PLOP3":
            index = carries[0] << 2 | carries[1] << 1 | carries[2]
            return [bool(v(i) >> index & 1) for i in (3, 4)]
        # A division of integers begins with an estimate of the reciprocal, which need not be exact.
        if name == "I2F" and "U32" in modes:
            return [as_word(float(v(0)))]
        if name == "MUFU" and "RCP" in modes:
            return [as_word(1 / as_float(v(0)))]
        if name == "F2I" and "U32" in modes:
            return [int(as_float(v(0)))]
        if name == "HFMA2" and sources[:2] == ["-RZ", "RZ"]:
            return [int.from_bytes(struct.pack("<2e", float(sources[3]), float(sources[2])), "little")]
        raise Unknown(name)
