"""The pages that users read: their code runs and computes what they say, every command and link exists."""

import contextlib
import importlib
import io
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import ROOT, needed

import torch_rope

pytestmark = pytest.mark.cpu
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "output", "sh", "text"}
DIAGRAMS: set[str] = set()  # the first lines of blocks labelled "text", which are neither code nor output


def blocks(page: str) -> list[tuple[str, str]]:
    """Returns (language, text) for each block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.search(r"^[ >]+```|^~~~", text, re.M), f"a block of {page} is indented, so this test does not see it"
    return re.findall(r"^```(\S*)\n(.*?)^```$", text, re.S | re.M)


def of_language(page: str, language: str) -> list[str]:
    return [text for name, text in blocks(page) if name == language]


# ---- The models that pages load. A page names a folder, and the test puts a small random model there. ----


def language_model(folder: Path) -> None:
    transformers = needed("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def video_model(folder: Path) -> None:
    needed("diffusers").WanTransformer3DModel(
        in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, num_attention_heads=2,
        attention_head_dim=32,
    ).save_pretrained(folder)  # fmt: skip


def hub_kernel(folder: Path) -> None:
    needed("kernels")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(importlib.import_module("hub_build").build().parent)


MODELS = {"path/to/model": language_model, "path/to/transformer": video_model, "path/to/torch-rope": hub_kernel}


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A function that does what the reader of a page does: it runs the Python blocks one after another, compares what
    each prints with the block of output below it, and returns the variables and all that was printed."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "integrations"))

    def read(page: str) -> SimpleNamespace:
        text = "\n".join(of_language(page, "python"))
        for folder, make in MODELS.items():
            if folder in text:
                make(tmp_path / folder)
        for module in dict.fromkeys(re.findall(r"^(?:import|from) (\w+)", text, re.M)):
            if module == "timm":
                importlib.import_module("vision_models")  # it imports timm without torchvision
            else:
                needed(module)
        if "kernelize" in text:  # transformers accepts only one minor release of kernels
            monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda *_, **__: True)
        if "WORLD_SIZE" in text:  # torchrun starts one process
            with socket.socket() as s:
                s.bind(("localhost", 0))
                port = s.getsockname()[1]
            for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
                monkeypatch.setenv(name, str(value))
        variables, everything, printed = {"__name__": page}, "", None
        for language, block in blocks(page):
            if language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block, page, "exec"), variables)
                printed = out.getvalue()
                everything += printed
            if language == "output":
                assert printed is not None, f"no block above this output of {page} prints it"
                assert agree(block, printed), f"{page} has\n{block}\nbut its code prints\n{printed}"
            if language != "python":
                printed = None
        return SimpleNamespace(**variables, printed=everything)

    yield read
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


def test_outputs_agree_up_to_last_digits():
    assert agree("a 1.5e-03 of 7\n", "a 1.6e-03  of 7\n") and agree("torch.Size([3])", "torch.Size([3])")
    assert not agree("a 1.5e-03 of 7", "a 1.5e-03 of 8") and not agree("a 1.5e-03", "a 2.5e-03")
    assert not agree("a 1.5", "b 1.5") and not agree("0.25 of", "0.35 of") and not agree("1", "1 2")


# ---- What the pages compute ----


def readme(v):
    assert v.q_rotated.requires_grad and v.q_rotated.shape == (2, 512, 32, 128)
    torch.testing.assert_close(v.q_rotated, v.expected, rtol=0, atol=2e-6)
    assert "apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in v.printed


def front_page(v):
    assert "apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in str(v.patched)
    assert not torch.equal(v.q_rotated, v.q_far)


def eager_rounding(v):
    assert v.rotated.dtype == torch.bfloat16 and (v.rotated - v.once).abs().max() < 0.1


def frequencies(v):
    assert torch.equal(v.inv_freq, torch_rope.inv_freq(v.head_dim)) and v.attention_factor > 1
    assert torch.equal(v.q_rotated, torch_rope.rotate(v.q, inv_freq=v.inv_freq))
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/guide/frequencies.md").read_text(encoding="utf-8"), re.M)
    assert listed == list(torch_rope.frequencies.KINDS)


def in_place(v):
    """q and k in the packed tensor were rotated, and v was not."""
    q, k, x = v.before.split([v.heads, v.kv_heads, v.kv_heads], dim=2)
    q, k = torch_rope.rotate_qk(q, k, inv_freq=v.inv_freq)
    assert torch.equal(v.qkv, torch.cat([q, k, x], 2)) and not torch.equal(v.qkv, v.before)


def kv_caches(v):
    """The static cache without slots is written from offset 100 on; with slots, padding is not written."""
    written = v.k_cache.any(-1).any(1)  # [batch, max_seq]
    assert written[:, 100 : 100 + v.seq].all() and written[0].nonzero().flatten().tolist()[:5] == [0, 1, 2, 3, 100]
    assert written[1].sum() == 2 * v.seq and written[0].sum() == 4 + v.seq
    cells = v.slots[v.slots >= 0]
    for cache in (v.paged_k, v.float8_k.float()):
        written = cache.flatten(0, 1).flatten(1).any(-1).nonzero().flatten()
        assert torch.equal(written, cells)
    torch.testing.assert_close(v.keys, v.paged_k, rtol=0.07, atol=0.02)  # float8 has 4 bits
    assert v.scores.shape == (v.batch, v.heads, v.seq, 100 + v.seq)
    # The last token of the loop attends to 8 cells.
    assert v.all_keys.any(-1).any(1).sum(-1).tolist() == [8] * v.batch
    assert torch.equal(v.all_keys[:, :, 7], torch_rope.rotate(v.new_k, inv_freq=v.rope.inv_freq, offset=7)[:, 0])
    caches = v.all_keys[:, :, :8], v.all_values[:, :, :8]
    attention = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(v.attended, attention(v.new_q.transpose(1, 2), *caches, enable_gqa=True))


def latent_attention(v):
    """q in place is what the functional operator returned, for positions that are those of the first sequence, and the
    cache has the latent and the rotated key of each token that has a slot."""
    assert torch.equal(v.q[0], v.q_rotated[0]) and not torch.equal(v.q[1], v.q_rotated[1])
    cells = v.cache.flatten(0, 1)[v.slots[0], 0]
    assert torch.equal(cells, torch.cat([v.latents[0, :, 0], v.k_pe_rotated[0, :, 0]], -1))
    assert v.cache.flatten(0, 1).any(-1).sum() == (v.slots >= 0).sum()
    # The scores are those of the keys that the weight makes.
    keys = torch.einsum("tl,hnl->htn", v.latents[0, :, 0], v.key_weight)
    keys = torch.cat([keys, v.k_pe_rotated[0].transpose(0, 1).expand(v.heads, -1, -1)], -1)
    expected = torch.einsum("hc,htc->ht", v.q_rotated[0, -1], keys) * (v.nope + v.rope_dim) ** -0.5
    torch.testing.assert_close(v.scores, expected, rtol=1e-4, atol=1e-3)
    assert v.attended.shape == (v.heads, v.latent)


def learned_frequencies(v):
    """Learned frequencies have a gradient, and start where the buffer was."""
    assert v.gradient.shape == (v.head_dim // 2,) and v.gradient.count_nonzero() > 0
    assert math.isclose(float(v.rope.inv_freq[1].detach()), 10000.0 ** (-2 / v.head_dim))


def positions(v):
    expected = torch_rope.rotate(
        v.packed_q, inv_freq=v.inv_freq, positions=torch.tensor([*range(4), *range(5), *range(3)])
    )
    assert torch.equal(v.rotated_q, expected) and torch.equal(v.rotated.values(), expected)
    padded = torch_rope.rotate(v.q[:1, 2:], inv_freq=v.inv_freq)
    assert torch.equal(v.q_rotated[:1, 2:], padded)


def qk_norm(v):
    norm = torch.nn.functional.rms_norm
    for x, actual in ((v.q, v.q_rotated), (v.k, v.k_rotated)):
        expected = torch_rope.rotate(norm(x, (v.head_dim,), eps=1e-6), inv_freq=v.inv_freq)
        torch.testing.assert_close(actual, expected)
    for x, actual in ((v.q, v.q_over_heads), (v.k, v.k_over_heads)):
        expected = norm(x, x.shape[-2:], eps=1e-6)
        torch.testing.assert_close(actual, torch_rope.rotate(expected, inv_freq=v.inv_freq))
    torch.testing.assert_close(v.k_cache[:, : v.seq], v.k_rotated)
    torch.testing.assert_close(v.v_cache[:, : v.seq], v.v_normalised)


def rotary_embedding(v):
    expected = torch_rope.rotate_qk(v.q, v.k, inv_freq=torch_rope.inv_freq(v.head_dim), offset=100)
    assert all(map(torch.equal, (v.q_rotated, v.k_rotated), expected))


def rotate(v):
    """All sources of the angles are the same rotation."""
    torch.testing.assert_close(v.q_by_position, v.q_rotated, rtol=0, atol=3e-6)
    expected = torch_rope.rotate(v.k, inv_freq=v.inv_freq, positions=v.token_positions)
    torch.testing.assert_close(v.k_by_token, expected, rtol=0, atol=3e-6)
    assert torch.equal(v.rotated, v.q_by_position.transpose(1, 2))
    expected = torch_rope.rotate(v.q, inv_freq=v.inv_freq, interleaved=True)
    torch.testing.assert_close(v.q_interleaved, expected, rtol=0, atol=1e-5)
    expected = torch_rope.rotate(v.q, v.cos3, v.sin3).transpose(1, 2)
    assert torch.equal(v.rotated_x, expected) and torch.equal(v.same_x, expected)


def several_axes(v):
    """The two ways to rotate all tokens but the prefix agree."""
    assert torch.equal(v.q_in_place, v.q_rotated) and torch.equal(v.k_in_place, v.k_rotated)
    assert torch.equal(v.q_rotated[:, : v.prefix], v.q[:, : v.prefix]) and not torch.equal(v.q_rotated, v.q)
    halves = zip(v.q.chunk(2, -1), (v.columns, v.rows), strict=True)
    expected = [torch_rope.rotate(x, inv_freq=v.half, positions=p) for x, p in halves]
    assert torch.equal(v.q_by_halves, torch.cat(expected, -1))
    assert (v.flux != 0).sum(1).tolist() == [8, 28, 28] and (v.flux != 0).sum(0).tolist() == [1] * 64
    assert not torch.equal(v.q_by_head[:, :, 0], torch_rope.rotate(v.q, v.cos4[:, :, 1], v.sin4[:, :, 1])[:, :, 0])


def tables(v):
    exact = torch.outer(torch.arange(8192, dtype=torch.float64), v.inv_freq)
    torch.testing.assert_close(v.cos.double(), exact.cos(), rtol=0, atol=5e-7)
    torch.testing.assert_close(v.sin_of_seconds, torch.outer(v.seconds.double(), v.inv_freq).sin())


def comfyui(v):
    expected = torch_rope.rotate_qk(v.q, v.k, v.cos, v.sin, interleaved=True)
    assert all(map(torch.equal, (v.q_rotated, v.k_rotated), expected))
    assert "torch_rope" not in v.comfy_kitchen.list_backends()


def diffusers(v):
    assert "apply_rotary_emb is torch.ops.rope.rotate" in v.printed


def transformers(v):
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as modeling

    assert "apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in v.printed
    torch.testing.assert_close(v.kernelized, v.expected)
    torch.testing.assert_close(v.model(v.tokens).logits, v.expected)
    config = modeling.Wav2Vec2ConformerConfig(
        hidden_size=32, num_attention_heads=2, position_embeddings_type="rotary", rotary_embedding_base=10000
    )
    layer = modeling.Wav2Vec2ConformerSelfAttention(config).eval()
    embed = modeling.Wav2Vec2ConformerRotaryPositionalEmbedding(config)
    x = torch.randn(2, 6, 32)
    expected = layer(x, relative_position_embeddings=embed(x))[0]
    try:
        with v.patch(layer):
            assert torch.equal(layer(x, relative_position_embeddings=embed(x))[0], expected)
    finally:
        v.register(modeling.Wav2Vec2ConformerSelfAttention._apply_rotary_embedding, None)


def onnx(v):
    for actual, expected in zip((v.q_rotated, v.k_rotated), v.expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=1e-6)
    expected = torch.cat([*v.rope(v.q, v.k), v.k], 2)
    torch.testing.assert_close(torch.from_numpy(v.packed_rotated), expected, rtol=0, atol=1e-6)


def hub(v):
    """The kernel has the bits of torch_rope, and the model has the results that it had."""
    assert torch.equal(v.q_rotated, torch_rope.rotate(v.q, inv_freq=v.inv_freq))
    assert v.kernel is not torch_rope and not torch.equal(v.k_rotated, v.k)
    torch.testing.assert_close(v.logits, v.expected)  # test_hub.py shows that the model calls the kernel


def timm(v):
    assert "is torch.ops.rope.rotate" in v.printed
    v.handle.undo()


def metal(v):
    expected = torch_rope.rotate(v.q, inv_freq=torch_rope.inv_freq(64), interleaved=True)
    torch.testing.assert_close(v.q_rotated, expected, rtol=0, atol=1e-5)


def parallel(v):
    assert torch.equal(v.q_rotated, torch_rope.rotate(v.q, inv_freq=torch_rope.inv_freq(64)))
    assert torch.equal(v.cp_q_rotated.to_local(), v.q_rotated) and torch.equal(v.cp_k_rotated.to_local(), v.k_rotated)
    assert torch.equal(v.tp_q_rotated.to_local(), v.rope(v.tp_q.to_local(), v.tp_k.to_local())[0])


CHECKS = {
    "README.md": readme,
    "docs/index.md": front_page,
    "docs/metal.md": metal,
    "docs/parallel.md": parallel,
    **{
        f"docs/guide/{check.__name__.replace('_', '-')}.md": check
        for check in (
            eager_rounding, frequencies, in_place, kv_caches, latent_attention, learned_frequencies, positions, qk_norm,
            rotary_embedding, rotate, several_axes, tables,
        )
    },
    **{f"docs/integrations/{check.__name__}.md": check for check in (comfyui, diffusers, hub, onnx, timm, transformers)},
}  # fmt: skip


# test_hub.py builds what the page about the Hub loads.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.xdist_group("hub")] if page.endswith("/hub.md") else [])
        for page in PAGES
        if of_language(page, "python")
    ],
)
def test_the_code_of_a_page_runs_and_computes_what_it_says(page, reader):
    """A page asserts something itself, or prints something that stands below the code, or has a check here."""
    variables = reader(page)
    if check := CHECKS.get(page):
        check(variables)
    else:
        code = "\n".join(of_language(page, "python"))
        assert of_language(page, "output") or re.search("^ *assert ", code, re.M), f"add a check of {page} to CHECKS"


def test_every_check_has_a_page():
    assert not [page for page in CHECKS if page not in PAGES or not of_language(page, "python")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_code_that_runs_or_its_output(page):
    for language, text in blocks(page):
        assert language in LANGUAGES, f"a block of {page} is labelled {language!r} but must be one of {LANGUAGES}"
        assert language != "text" or text.partition("\n")[0] in DIAGRAMS, f"{page}: name this diagram in DIAGRAMS"


def test_the_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200
    headings = "Install, Use, What it computes, Why torch_rope, In a transformers model, Which function, "
    headings += "What is supported, Speed, Develop"
    assert re.findall(r"^## (.*)", text, re.M) == headings.split(", ")
    assert text.index("make demo") < text.index("make test") < text.index("## Use")


COMMANDS = sorted(
    {line.split("#")[0].strip() for page in PAGES for block in of_language(page, "sh") for line in block.splitlines()}
)


# pip writes into the source folder, so the process that runs test_wheel.py runs it.
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.xdist_group("wheel")] if c.startswith("pip") else []) for c in COMMANDS],
)
def test_every_command_of_the_pages_runs(command):
    """Runs a command as far as is possible in seconds: pip and make without their effect, the others for their help.

    test_demo.py runs `make demo`, test_selfcheck.py the self-check, and test_parallel.py what torchrun starts.
    """
    program, *arguments = shlex.split(command)
    python = [sys.executable]
    commands = {
        "pip": [*python, "-m", "pip", "install", "--dry-run", "--no-deps", *arguments[1:]],
        "make": ["make", "--dry-run", *arguments],
        "python": [*python, *arguments, "--help"],
        "torchrun": [*python, arguments[-1], "--help"],
    }
    assert program in commands and (program != "pip" or arguments[0] == "install")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(commands[program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {path}"
        if anchor:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page} links to {path}#{anchor}"


def test_comments_and_docstrings_begin_with_their_subject():
    """A comment that begins with one of these words is a fragment, which only its author understands."""
    fragment = re.compile(r'(?:^|\s)(?:(?://|#|/\*) |""")(?:Of|What|That|Whether|Those|Beside)\b')
    folders = ["csrc", "shaders", "torch_rope", "tests", "benchmarks", "examples"]
    suffixes = {".py", ".h", ".cpp", ".inc", ".cu", ".cuh", ".mm", ".metal"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if fragment.search(line)
    ]
    assert not found, "\n".join(found)
