"""The pages that users read: their code runs and computes what they say, every command and link exists."""

import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import ROOT, needed, python

import torch_rope

pytestmark = pytest.mark.cpu
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
ALONE = "docs/inductor-slices.md"  # runs in a process without torch_rope, which would change what torch computes
NIGHTLY = {ALONE, "comfy_kitchen", "diffusers", "kernels", "onnxruntime", "timm"}  # pages, and modules of pages


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    """Returns (language, text) for each block of a page, in order."""
    return re.findall(r"^```(\S*)\n(.*?)^```$", text_of(page), re.S | re.M)


def of_language(page: str, language: str) -> list[str]:
    return [text for name, text in blocks(page) if name == language]


def modules_of(page: str) -> list[str]:
    return re.findall(r"^(?:import|from) (\w+)", "\n".join(of_language(page, "python")), re.M)


# ---- The models that pages load. A page names a folder, and the test puts a small random model there. ----


def language_model(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers = needed("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).save_pretrained(folder)


def video_model(folder: Path) -> None:
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 1}
    model = needed("diffusers").WanTransformer3DModel(**sizes, num_attention_heads=2, attention_head_dim=32)
    model.save_pretrained(folder)


def hub_kernel(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(importlib.import_module("hub_build").build().parent)


MODELS = {"path/to/model": language_model, "path/to/transformer": video_model, "path/to/torch-rope": hub_kernel}


def read(page: str, tmp_path, monkeypatch) -> tuple[dict, str]:
    """Does what the reader of a page does: runs the Python blocks one after another, and compares what each prints with
    the block of output below it. Returns the variables and all that was printed."""
    text = "\n".join(of_language(page, "python"))
    for folder, make in MODELS.items():
        if folder in text:
            make(tmp_path / folder)
    for module in modules_of(page):
        # vision_models imports timm without torchvision
        importlib.import_module("vision_models") if module == "timm" else needed(module)
    if "kernelize" in text:  # transformers accepts only one minor release of kernels
        monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda *_, **__: True)
    if "WORLD_SIZE" in text:  # torchrun starts one process
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
    variables, everything, printed = {"__name__": page}, "", None
    for language, block in blocks(page):
        if language == "python" and page == ALONE:
            printed = python(block).stdout
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page, "exec"), variables)
            everything += (printed := out.getvalue())
        elif language == "output":
            assert printed is not None, f"no block above this output of {page} prints it"
            assert agree(block, printed), f"{page} has\n{block}\nbut its code prints\n{printed}"
        if language != "python":
            printed = None
    return variables, everything


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def agree(wanted: str, printed: str) -> bool:
    """Returns whether two outputs are the same, but for the last digits of numbers that are not whole: other machines
    may compute another cosine."""

    def near(a: str, b: str) -> bool:
        x, y = (float(n.replace(",", "")) for n in (a, b))
        digits = len(re.sub(r"e.*|.*\.", "", a)) if "." in a else 0
        unit = 10.0 ** (int(a.partition("e")[2] or 0) - digits)
        return x == y or ("." in a and abs(x - y) <= max(0.05 * abs(x), 1.5 * unit))

    numbers = [NUMBER.findall(text) for text in (wanted, printed)]
    rest = [NUMBER.sub("#", text).split() for text in (wanted, printed)]
    return rest[0] == rest[1] and len(numbers[0]) == len(numbers[1]) and all(map(near, *numbers))


# The expressions that are true after the code of a page, in its variables and those of NAMES.
PATCHED = "'apply_rotary_pos_emb is torch.ops.rope.rotate_qk' in printed"
CHECKS = {
    "README.md": ["near(q_rotated, expected, atol=2e-6)", PATCHED],
    "docs/parallel.md": ["equal(cp_q_rotated.to_local(), q_rotated) and equal(cp_k_rotated.to_local(), k_rotated)"],
    "docs/guide/frequencies.md": [
        "equal(q_rotated, tr.rotate(q, inv_freq=tr.inv_freq(head_dim))) and attention_factor > 1",
        "gradient.all() and near(rope.inv_freq, tr.inv_freq(head_dim))",
    ],
    "docs/guide/kv-caches.md": [
        # Padding is not written, with or without pages; the rest goes to the cells that the page names.
        "[n.nonzero().flatten().tolist()[:5] for n in k_cache.any(-1).any(1)] == [[0, 1, 2, 3, 100], [0, 1, 2, 3, 4]]",
        "equal(paged_k.flatten(0, 1).flatten(1).any(-1).nonzero().flatten(), slots[slots >= 0])",
        "near(keys, paged_k, rtol=0.07, atol=0.02)",  # float8 has 4 bits
        "equal(all_keys[:, :, 7], tr.rotate(new_k, inv_freq=rope.inv_freq, offset=7)[:, 0])",
        "equal(cache[5, :6, 0, :latent], latents[1, :, 0])",
    ],
    "docs/guide/positions.md": [
        "equal(rotated_q, rotated.values()) and equal(q_rotated[:1, 2:], tr.rotate(q[:1, 2:], inv_freq=inv_freq))",
    ],
    "docs/guide/qk-norm.md": [
        "near(q_rotated, tr.rotate(rms_norm(q, (head_dim,), eps=1e-6), inv_freq=inv_freq), atol=1e-5)",
        "near(k_over_heads, tr.rotate(rms_norm(k, k.shape[2:], eps=1e-6), inv_freq=inv_freq), atol=1e-5)",
    ],
    "docs/guide/rotary-embedding.md": ["equal(k_rotated, tr.rotate(k, inv_freq=tr.inv_freq(head_dim), offset=100))"],
    "docs/guide/rotate.md": [
        "near(q_by_position, q_rotated, atol=3e-6) and equal(rotated, q_by_position.transpose(1, 2))",
        "near(cos.double(), torch.outer(torch.arange(8192.0), inv_freq).cos(), atol=5e-7)",
        "equal(rotated_x, q_by_token.transpose(1, 2)) and equal(same_x, rotated_x)",
        "equal(q_part, tr.rotate(before[:, :, :heads], inv_freq=inv_freq)) and equal(v_part, before[:, :, -kv_heads:])",
    ],
    "docs/guide/several-axes.md": [
        "equal(q_in_place, q_rotated) and equal(k_in_place, k_rotated) and equal(q_rotated[:, :2], q[:, :2])",
        "equal(q_by_head[:, :, 1], tr.rotate(q, cos4[:, :, 1], sin4[:, :, 1])[:, :, 1]) and flux.shape == (3, 64)",
    ],
    "docs/integrations/diffusers.md": ["'apply_rotary_emb is torch.ops.rope.rotate' in printed"],
    "docs/integrations/transformers.md": [
        PATCHED,
        "near(kernelized, expected) and near(model(tokens).logits, expected)",
    ],
    "docs/integrations/onnx.md": [
        "near(torch.from_numpy(q_rotated), expected[0], atol=1e-6)",
        "near(torch.from_numpy(packed_rotated), torch.cat([*rope(q, k), k], 2), atol=1e-6)",
    ],
    "docs/integrations/hub.md": ["equal(q_rotated, tr.rotate(q, inv_freq=inv_freq)) and near(logits, expected)"],
    "docs/integrations/others.md": [
        "'is torch.ops.rope.rotate' in printed and equal(q_rotated, tr.rotate(q, cos, sin, interleaved=True))",
    ],
}


def near(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-6, atol: float = 1e-6) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol, atol)


NAMES = {"tr": torch_rope, "equal": torch.equal, "near": near, "rms_norm": torch.nn.functional.rms_norm, "re": re}


def marks_of(page: str) -> list:
    return [pytest.mark.exhaustive, pytest.mark.xdist_group("hub")] if NIGHTLY & {page, *modules_of(page)} else []


@pytest.mark.parametrize("page", [pytest.param(p, marks=marks_of(p)) for p in PAGES if of_language(p, "python")])
def test_the_code_of_a_page_runs_and_computes_what_it_says(page, tmp_path, monkeypatch):
    """A page asserts something itself, or prints something that stands below the code, or has a check here."""
    monkeypatch.chdir(tmp_path)
    for folder in ("exhaustive/models", "exhaustive/package"):  # vision_models.py, hub_build.py
        monkeypatch.syspath_prepend(str(ROOT / "tests" / folder))
    try:
        variables, printed = read(page, tmp_path, monkeypatch)
        for check in CHECKS.get(page, []):
            assert eval(check, {**variables, **NAMES, "printed": printed, "text": text_of(page)}), check
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    code = "\n".join(of_language(page, "python"))
    assert page in CHECKS or of_language(page, "output") or re.search("^ *assert ", code, re.M), "add a check to CHECKS"


# ---- The text ----


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_code_or_its_output_and_every_link_leads_somewhere(page):
    text = text_of(page)
    assert not re.search(r"^[ >]+```|^~~~", text, re.M), "a block is indented, so these tests do not see it"
    assert {language for language, _ in blocks(page)} <= {"python", "output", "sh", "toml"}
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, (
                path + anchor
            )


def test_every_name_of_the_architecture_exists_where_the_page_looks_for_it():
    """A name in a row of stops is in the code that the row links to, any other name in the sources or the Makefile."""

    def words(*paths: str) -> set[str]:
        files = [f for p in map(ROOT.joinpath, paths) for f in (p.rglob("*.[chmip]*") if p.is_dir() else [p])]
        return {*re.findall(r"\w+", " ".join(f"{f} {f.read_text(errors='ignore')}" for f in files))}

    sources = words("csrc", "shaders", "torch_rope", "tests/backends", "tests/cases.py", "Makefile")
    for line in text_of("docs/architecture.md").splitlines():
        names = {name for code in re.findall(r"`([^`]+)`", line) for name in re.findall(r"\w+", code)}
        known = words(*re.findall(r"\]\(../([^)]+)\)", line)) if re.match(r"\| [1-8]", line) else sources
        assert names <= known, f"{names - known}: {line}"


def test_a_kind_of_frequencies_is_in_every_list():
    """A kind is a function of kinds.py that returns Frequencies. CONTRIBUTING.md has the files that it needs."""
    source = text_of("torch_rope/frequencies/kinds.py")
    known = {*re.findall(r"^def (\w+)(?:(?!^def ).)*?\) -> Frequencies:", source, re.S | re.M)}
    api, guide = text_of("docs/api/frequencies.md"), text_of("docs/guide/frequencies.md")
    lists = {
        "KINDS in torch_rope/frequencies/kinds.py": torch_rope.frequencies.KINDS,
        "__all__ in torch_rope/frequencies/__init__.py": torch_rope.frequencies.__all__,
        "members in docs/api/frequencies.md": re.findall(r"\w+", api.partition("members:")[2]),
        "the table in docs/guide/frequencies.md": re.findall(r"^\| `(\w+)` \|", guide, re.M),
    }
    for where, names in lists.items():
        assert not known - {*names}, f"add {', '.join(known - {*names})} to {where}"


COMMANDS = {line.split("#")[0].strip() for p in PAGES for block in of_language(p, "sh") for line in block.splitlines()}

# pip writes into the source folder, so the process that runs test_wheel.py runs it.
AT_NIGHT = [pytest.mark.exhaustive, pytest.mark.xdist_group("wheel")]


@pytest.mark.parametrize("command", [pytest.param(c, marks=AT_NIGHT * (c[:4] != "make")) for c in sorted(COMMANDS)])
def test_every_command_of_the_pages_runs(command):
    """Runs a command as far as is possible in seconds: pip and make without their effect, the others for their help."""
    program, *arguments = shlex.split(command)
    python = [sys.executable]
    commands = {
        "pip": [*python, "-m", "pip", "install", "--dry-run", "--no-deps", *arguments[1:]],
        "make": ["make", "--dry-run", *arguments],
        "git": ["git", "version"],  # the address is a placeholder
        "python": [*python, *arguments, "--help"],
        "torchrun": [*python, arguments[-1], "--help"],
    }
    assert program in commands and (program != "pip" or arguments[0] == "install")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(commands[program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
