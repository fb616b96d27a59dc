"""The pages that users read: the code of README.md and docs/usage.md runs, every command and link of every page exists."""

import math
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from cases import ROOT

import torch_rope

pytestmark = pytest.mark.cpu
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)


def run(page: str) -> dict:
    """Runs the Python blocks of a page one after another, as a reader would, and returns their variables."""
    variables = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), variables)
    return variables


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory that has a small model at the path that the README names."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "path/to/model")
    monkeypatch.chdir(tmp_path)


def test_the_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200
    headings = "Install, Use, What it computes, Why torch_rope, In a transformers model, Which function, "
    headings += "What is supported, Speed, Develop"
    assert re.findall(r"^## (.*)", text, re.M) == headings.split(", ")
    assert text.index("make demo") < text.index("make test") < text.index("## Use")


def test_the_code_of_the_readme_runs_and_computes_what_it_says(model, capsys):
    torch.manual_seed(0)
    variables = run("README.md")
    q_rotated, expected = variables["q_rotated"], variables["expected"]
    assert q_rotated.requires_grad and q_rotated.shape == (2, 512, 32, 128)
    torch.testing.assert_close(q_rotated, expected, rtol=0, atol=2e-6)
    assert "apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in capsys.readouterr().out


def test_the_code_of_the_usage_page_runs_and_computes_what_it_says():
    v = run("docs/usage.md")
    batch, seq, heads, head_dim = v["q"].shape
    # The static cache without slots is written from offset 100 on; with slots, padding is not written.
    written = v["k_cache"].any(-1).any(1)  # [batch, max_seq]
    assert written[:, 100 : 100 + seq].all() and written[0].nonzero().flatten().tolist()[:5] == [0, 1, 2, 3, 100]
    assert written[1].sum() == 2 * seq and written[0].sum() == 4 + seq
    written = v["paged_k"].flatten(0, 1).flatten(1).any(-1).nonzero().flatten()
    assert torch.equal(written, v["slots"][v["slots"] >= 0])
    # The two ways to rotate all tokens but the prefix agree. q was rotated in place since, so both are computed again.
    q_rotated, k_rotated = torch_rope.rotate_qk(v["q"], v["k"], v["cos_all"], v["sin_all"])
    q, k = v["q"].clone(), v["k"].clone()
    torch_rope.rotate_qk_(q[:, v["prefix"] :], k[:, v["prefix"] :], v["cos_patches"], v["sin_patches"])
    assert torch.equal(q, q_rotated) and torch.equal(k, k_rotated)
    assert torch.equal(q[:, : v["prefix"]], v["q"][:, : v["prefix"]]) and not torch.equal(q, v["q"])
    # Learned frequencies have a gradient, and start where the buffer was.
    original = v["rope"].parametrizations.inv_freq.original
    assert original.grad.shape == (head_dim // 2,) and original.grad.count_nonzero() > 0
    assert math.isclose(float(v["rope"].inv_freq[1].detach()), 10000.0 ** (-2 / head_dim))
    # Multi-head latent attention: q in place is what the functional operator returned, for positions that are those of
    # the first sequence, and the cache has the latent and the rotated key of each token that has a slot.
    assert torch.equal(v["mla_q"][0], v["mla_q_rotated"][0])
    cells = v["cache"].flatten(0, 1)[v["slots"][0], 0]
    assert torch.equal(cells, torch.cat([v["latents"][0, :, 0], v["k_pe_rotated"][0, :, 0]], -1))


COMMANDS = sorted(
    {line.split("#")[0].strip() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_pages_runs(command):
    """Runs a command as far as is possible in seconds: pip and make without their effect, the others for their help.

    test_demo.py runs `make demo`, test_selfcheck.py the self-check, and `make test` runs this.
    """
    program, *arguments = shlex.split(command)
    python = [sys.executable]
    commands = {
        "pip": [*python, "-m", "pip", "install", "--dry-run", "--no-deps", *arguments[1:]],
        "make": ["make", "--dry-run", *arguments],
        "python": [*python, *arguments, "--help"],
        "torchrun": [*python, "-m", "torch.distributed.run", *arguments, "--help"],
    }
    assert program in commands and (program != "pip" or arguments[0] == "install")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(commands[program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
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
