"""Reads the attention layers and the RMS norms of the installed transformers, and prints the entries of known_layers.py for their texts.

    python tests/known/forwards.py                 prints entries, and what it cannot tell
    python tests/known/forwards.py --missing       only those that the table has not
    python tests/known/forwards.py --check [name]  compares fused models with their own layers, see language_models.py

A forward is followed from its arguments to the call of the attention function, with the names of its values replaced by what
they are. Views are left out: --check compares numbers.
"""

import ast
import collections
import copy
import importlib
import inspect
import itertools
import os
import re
import sys

import torch
import transformers
from torch import nn

sys.path[:0] = [os.path.join(os.path.dirname(__file__), *path) for path in ([".."], ["..", "exhaustive", "models"])]

from torch_rope.integrations._fuse import Norm  # noqa: E402
from torch_rope.integrations._text import NoText, _tree, plain, text_of  # noqa: E402
from torch_rope.integrations.transformers import LIBRARY, known_layers  # noqa: E402
from torch_rope.integrations.transformers.fuse import ROLES  # noqa: E402
from torch_rope.integrations.transformers.known_layers import Layer  # noqa: E402

VIEWS = {"view", "transpose", "reshape", "contiguous", "flatten", "unsqueeze", "expand"}
# What the forwards of the forms say that are recognised by a word: the attributes of self.
MLA = """q_lora_rank q_proj q_b_proj q_a_layernorm q_a_proj qk_head_dim qk_nope_head_dim qk_rope_head_dim kv_a_proj_with_mqa
    kv_lora_rank kv_a_layernorm expand_kv config layer_idx training attention_dropout scaling o_proj"""
SHARED = """head_dim config q_proj k_proj v_proj o_proj q_norm k_norm v_norm is_kv_shared_layer store_full_length_kv layer_type
    kv_shared_layer_index layer_idx training attention_dropout scaling sliding_window"""


AFTER = "its norms follow the rotation"
TABLES = [["position_embeddings[0]", "position_embeddings[1]"]]  # of rotary functions
TABLES += [[*TABLES[0], "unsqueeze_dim=1"]]


class Unclear(Exception):
    """Says what the tool cannot tell."""


# ---- classes ----


def modules():
    root = os.path.dirname(transformers.models.__file__)
    for folder in sorted(os.listdir(root)):
        if os.path.exists(f"{root}/{folder}/modeling_{folder}.py"):
            try:
                yield importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            except ImportError:
                print(f"# {folder} cannot be imported")


def classes():
    """Yields the classes whose forward calls a rotary function and an attention function, and these functions' names."""
    for module in modules():
        for name, cls in list(vars(module).items()):
            if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
                function = plain(cls.forward)
                names = set(function.__code__.co_names) if inspect.isfunction(function) else set()
                rotary = {n for n in names if LIBRARY.rotary.search(n) and n in vars(module)}
                if rotary and ROLES[0] in names:
                    yield name, cls, function, rotary


# ---- forwards ----


class Replace(ast.NodeTransformer):
    """Replaces names by what they are."""

    def __init__(self, known):
        self.known = known

    def visit_Name(self, node):
        return copy.deepcopy(self.known.get(node.id, node))


def says(node):
    return ast.unparse(node)


def bare(node):
    """Returns a value without the views around it."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
        node = node.func.value
    return node


def called(node):
    """Returns what a call calls, or an empty text."""
    return says(node.func) if isinstance(node, ast.Call) else ""


class Forward:
    """The values of a forward: of q, k and v, what the attention function and the cache get, and the result."""

    def __init__(self, function, rotary):
        self.rotary, self.known, self.update, self.stores, self.result = rotary, {}, None, None, None
        tree = _tree(function)
        self.arguments = [a.arg for a in tree.args.args[1:]]
        self.follow(tree.body)

    def follow(self, body, tests=()):
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.If):
                self.branch(node, tests)
            elif isinstance(node, ast.Return):
                self.result = self.value(node.value)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                self.assign(target, self.value(node.value), tests)
            else:
                raise Unclear(f"{says(node)!r}")

    def branch(self, node, tests):
        test, before = self.value(node.test), dict(self.known)
        self.follow(node.body, (*tests, says(test)))
        then, self.known = self.known, dict(before)
        self.follow(node.orelse, tests)
        other = self.known
        self.known = {n: self.chosen(test, then.get(n), other.get(n)) for n in {**then, **other}}

    def chosen(self, test, a, b):
        if a is None or b is None or says(a) == says(b):
            return b if a is None else a
        if "cache_k" in says(a) or "cache_v" in says(a):  # what a cache returns
            return a
        return ast.IfExp(test, a, b)

    def value(self, node):
        return Replace(self.known).visit(copy.deepcopy(node))

    def assign(self, target, value, tests):
        if isinstance(target, ast.Subscript):
            self.stores = says(target.slice)
            return
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if called(value).endswith(".update"):
            if any(
                re.sub(r"\(?(not )?self.is_kv_shared_layer\)?|cache|past_key_values| is not None| and ", "", t)
                for t in tests
            ):
                raise Unclear(f"when the cache is used: {tests}")
            self.update = self.update or value
            self.cached = [bare(a) for a in value.args[:2]]
            value = ast.Tuple([ast.Name("cache_k"), ast.Name("cache_v")])
        if called(value).startswith(ROLES[0]) and isinstance(value.func, ast.Call):
            if any(k.arg is None and says(k.value) != "kwargs" for k in value.keywords) or len(value.args) != 5:
                raise Unclear("the call of the attention function")
            self.attention, value = value, ast.Tuple([ast.Name("out"), ast.Name("scores")])
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else None
            for i, name in enumerate(names):
                self.known[name.id] = parts[i] if parts else ast.Subscript(value, ast.Constant(i))
        else:
            self.known[target.id] = value

    # ---- records ----

    def record(self):
        """Returns the record of a forward, or raises Unclear."""
        if missing := {"hidden_states", "position_embeddings", "attention_mask"} - {*self.arguments}:
            raise Unclear(f"an argument in the place of {sorted(missing)[0]}")
        text = says(self.attention) + (says(self.update) if self.update else "")
        words = {"arguments": " ".join(self.arguments), "tells": self.tells(), "update": self.of_update()}
        if "kv_a_proj_with_mqa" in text:
            words |= self.latent(text)
        elif "shared_kv_states" in self.arguments:
            words |= self.shared(text)
        else:
            words |= self.separate()
        if "self.rotary_ndims" in text:
            words["channels"] = "self.rotary_ndims"
        return Layer(**words | {"out": self.out()})

    def of_update(self):
        if self.update is None:
            return Layer().update
        if len(self.update.args) != 3 or says(self.update.args[2]) != "self.layer_idx":
            raise Unclear("the arguments of the cache")
        return ", ".join(f"{k.arg}={says(k.value)}" for k in self.update.keywords)

    def tells(self):
        words = {k.arg: says(k.value) for k in self.attention.keywords if k.arg}
        words = {
            n: re.sub(r"^(.*) if self.training else 0.0$", r"0.0 if not self.training else \1", w)
            for n, w in words.items()
        }
        return ", ".join(f"{n}={words[n]}" for n in sorted(words, key=("dropout", "scaling", *words).index))

    def out(self):
        if not isinstance(self.result, ast.Tuple) or says(self.result.elts[1]) != "scores":
            raise Unclear("what is returned")
        node = Unviewed().visit(copy.deepcopy(self.result.elts[0]))
        other = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"self", "out", "gate", "nn", "torch"}
        if other:
            raise Unclear(f"the result {says(node)}")
        return says(node)

    def qkv(self):
        q, k, v = (bare(a) for a in self.attention.args[1:4])
        if self.update is not None:
            if (says(k), says(v)) != ("cache_k", "cache_v"):
                raise Unclear("what the cache returns")
            k, v = self.cached
        if says(self.attention.args[4]) != "attention_mask":
            raise Unclear("the mask")
        return q, k, v

    def peeled(self, node, words):
        """Returns the projection that a value is made of, with the words for what is done to it."""
        node = bare(node)
        rotated = "rotated" in words
        if isinstance(node, ast.IfExp) and says(node.test) == "hasattr(self, 'qk_norm')":  # of Llama 4
            return self.peeled(node.orelse, words | {"never": f"{AFTER!r} if {says(node.test)} else ''"})
        if isinstance(node, ast.IfExp):
            inner = self.peeled(node.body, dict(words))
            other, new = self.peeled(node.orelse, dict(words))
            if inner[0] != other:
                raise Unclear(f"the branch {says(node.test)}")
            added = [n for n in ("rotated", "norm", "factor") if n in inner[1] and n not in new]
            if len(added) != 1:
                raise Unclear(f"the branch {says(node.test)}")
            [what] = added
            more = {"norm": "normed", "rotated": "rotated", "factor": "factor"}[what]
            if says(node.test) == "position_embeddings is not None":  # without them, the own forward computes
                return inner[0], {**new, **inner[1]}
            done = f"({inner[1]['factor']}) if {says(node.test)} else None" if what == "factor" else says(node.test)
            return inner[0], {**new, **inner[1], more: done}
        if called(node) == "torch.cat" and isinstance(
            pair := node.args[0], ast.Tuple
        ):  # the channels that rotate, and others
            turned, rest = map(bare, pair.elts)
            whole = bare(turned.value).args[turned.slice.value].value
            if says(whole) != says(bare(rest).value):
                raise Unclear(f"what stands side by side: {says(node)[:80]}")
            bare(turned.value).args[turned.slice.value] = whole
            node = turned
        if called(node).endswith(".to") and isinstance(node.func.value, ast.BinOp):
            node = node.func.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and not rotated:
            return self.peeled(node.left, words | {"factor": says(Unviewed().visit(copy.deepcopy(node.right)))})
        if isinstance(node, ast.Subscript) and called(bare(node.value)) in self.rotary:
            call = bare(node.value)
            first = not ("position_embeddings.to" in says(call) and "transpose" not in says(call.args[0]))
            others = [*map(says, call.args[2:]), *(f"{k.arg}={says(k.value)}" for k in call.keywords)]
            if others not in TABLES and not others[0].startswith("position_embeddings.to("):
                raise Unclear(f"the arguments of {called(call)}")
            if words.pop("norm", None):
                words = words | {"never": repr(AFTER)}
            return self.peeled(call.args[node.slice.value], words | {"rotated": "True", "heads_first": first})
        if re.fullmatch(r"self\.\w*norm\w*", called(node)):
            if "norm" in words:
                raise Unclear("two norms")
            return self.peeled(node.args[0], words | {"norm": called(node).removeprefix("self.")})
        return says(Unviewed().visit(copy.deepcopy(node))), words

    def separate(self):
        (q, of_q), (k, of_k), (v, of_v) = (self.peeled(node, {}) for node in self.qkv())
        norms = [w.pop("norm", "") for w in (of_q, of_k, of_v)]
        factor = of_q.pop("factor", None)
        if of_q != of_k or of_v or bool(norms[0]) != bool(norms[1]) or "rotated" not in of_q:
            raise Unclear(f"q, k and v: {of_q}, {of_k}, {of_v}")
        projections = {tuple(f"self.{n}_proj(hidden_states)" for n in "qkv"): "separate"}
        gated = "torch.chunk(self.q_proj(hidden_states), 2, dim=-1)[0]"
        projections[(gated, *[*projections][0][1:])] = "gated"
        projections[tuple(f"self.Wqkv(hidden_states).unbind(dim=-3)[{i}]" for i in range(3))] = "thirds"
        packed = "self.config.num_attention_heads * self.head_dim", "self.num_key_value_heads * self.head_dim"
        cuts = (
            f"[..., :{packed[0]}]",
            f"[..., {packed[0]}:{packed[0]} + {packed[1]}]",
            f"[..., {packed[0]} + {packed[1]}:]",
        )
        projections[tuple(f"self.qkv_proj(hidden_states){cut}" for cut in cuts)] = "packed"
        if (form := projections.get((q, k, v))) is None:
            raise Unclear(f"the projections {q}, {k}, {v}")
        words = of_q | {"norms": " ".join(norms[:2]).strip(), "norm_of_v": norms[2], "form": form}
        return words | ({"factor": without_dtype(factor)} if factor else {})

    def latent(self, text):
        if more := set(re.findall(r"\bself\.(\w+)", text)) - {*MLA.split()}:
            raise Unclear(f"self.{sorted(more)[0]}")
        q, latent = self.attention.args[1], self.cached[0]
        factor = bare(q)
        words = {
            "form": "latent",
            "channels": "self.qk_rope_head_dim",
            "norm_of_v": called(bare(latent)).removeprefix("self."),
        }
        if isinstance(factor, ast.BinOp):
            words["factor"] = without_dtype(says(factor.right))
        names = sorted(n for n in self.rotary if f"{n}(" in text)
        if len(names) == 2:
            words["rotary"] = f"{names[1]!r} if self.config.rope_interleave else {names[0]!r}"
        return words

    def shared(self, text):
        if more := set(re.findall(r"\bself\.(\w+)", text)) - {*SHARED.split()}:
            raise Unclear(f"self.{sorted(more)[0]}")
        reads = re.search(r"shared_kv_states\[(.*?)\]", text)[1]
        norms = {"norms": "q_norm k_norm", "norm_of_v": "v_norm"}
        return norms | {"form": "shared", "reads": reads, "stores": self.stores}


class Unviewed(ast.NodeTransformer):
    """Leaves out views, and names the gate."""

    def visit(self, node):
        node = self.generic_visit(bare(node))
        if isinstance(node, ast.Subscript) and called(node.value) == "torch.chunk" and says(node.slice) == "1":
            return ast.Name("gate")
        return bare(node)


def without_dtype(factor):
    """Returns the words for a factor, which is rounded to the dtype of q, that of hidden_states."""
    return re.sub(r"\.to\((?!hidden_states).*?\.dtype\)$", ".to(hidden_states.dtype)", factor)


def entries():
    """Returns what the texts of attention classes are: a record, or what the tool cannot tell, and the classes."""
    found, names = {}, collections.defaultdict(list)
    for name, cls, function, rotary in classes():
        try:
            text = text_of(function, {*ROLES, *rotary}, cls)
            found[text] = Forward(function, rotary).record()
        except NoText as error:
            text = f"no text: {error}"
            found[text] = ""
        except (Unclear, AttributeError, TypeError, IndexError) as error:
            found[text] = str(error)
        names[text].append(name)
    return {text: (found[text], names[text]) for text in found}


def line(text, record, names):
    words = ", ".join(f"{n}={v!r}" for n, v in record._asdict().items() if v != Layer._field_defaults[n])
    return f"    {text!r}: Layer({words}),  # {', '.join(n.removesuffix('Attention') for n in names)}"


# ---- norms ----


def norm_of(cls):
    """Returns the record of an RMS norm, which is tried, or raises Unclear."""
    words = "".join(says(_tree(plain(f))) for n in ("forward", "_norm") if (f := getattr(cls, n, None)))
    eps = {*re.findall(r"self\.(variance_epsilon|eps)\b", words)}
    try:
        module = cls(64).bfloat16()
        nn.init.uniform_(module.weight, 0.5, 1.5)
    except (TypeError, AttributeError):
        raise Unclear("how it is made") from None
    if len(eps) != 1 or module.weight.shape != (64,):
        raise Unclear("its eps" if len(eps) != 1 else "its weight")
    x = torch.randn(999, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + getattr(module, *eps))
    for offset, rounds in itertools.product((0.0, 1.0), (False, True)):
        by = (y.bfloat16() if rounds else y).float() * (module.weight.float() + offset)
        if (module(x) != by.bfloat16()).float().mean() < 1e-3:
            return Norm(*eps, offset, rounds)
    raise Unclear("what it computes")


def norms():
    """Returns what the texts of RMS norms are: a record, or what the tool cannot tell, and the classes."""
    found = {}
    for cls in (cls for module in modules() for cls in vars(module).values() if isinstance(cls, type)):
        if issubclass(cls, nn.Module) and re.search("(RMS|L2)Norm$", cls.__name__):
            try:
                text = text_of(cls.forward, owner=cls)
                record = found[text][0] if text in found else norm_of(cls)
            except (NoText, Unclear) as error:
                text, record = str(error), ""
            found.setdefault(text, (record, []))[1].append(cls.__name__)
    return found


if __name__ == "__main__":
    if "--check" in sys.argv:
        import language_models

        language_models.check(sys.argv[sys.argv.index("--check") + 1 :])
    else:
        print(f"# transformers {transformers.__version__}")
        for text, (record, names) in sorted(entries().items(), key=lambda item: -len(item[1][1])):
            if "--missing" not in sys.argv or text not in known_layers.FORWARDS:
                told = isinstance(record, Layer)
                print(line(text, record, names) if told else f"    # {text}: {', '.join(names)}: cannot tell {record}")
        for text, (record, names) in norms().items():
            if "--missing" not in sys.argv or text not in known_layers.NORMS:
                print(
                    f"    {text!r}: {record}," if record else f"    # cannot tell {text}",
                    "#",
                    ", ".join(dict.fromkeys(names)),
                )
