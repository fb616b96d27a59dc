"""Writes the tables of rotary functions that torch_rope knows: known.py of each library.

``make known`` runs it for the installed releases, and FOLDERS="a b" also for releases that are unpacked in these folders. It
reads all modeling files, tries each new text on random numbers, says what it cannot tell, and adds the others to the
tables. Entries of releases that are not there stay. Read the difference before it is committed: a function that branches
may do something else where the trial did not look.
"""

import argparse
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from known import trial

from torch_rope.integrations import diffusers, timm, transformers
from torch_rope.integrations._known import FUNCTIONS as OF_OTHERS
from torch_rope.integrations._patch import Library
from torch_rope.integrations._reading import Known
from torch_rope.integrations._text import NoText, nested, plain, text_of

ROOT = Path(__file__).parents[2]
HEAD = '''"""The rotary functions of {1} that are known, by their texts, see _text.py.

``make known`` makes this table from the releases that it names.
"""

from {0}_bits import Rounds
from {0}_reading import Known

'''
OTHERS = Library("", "", re.compile("rot|rope"), OF_OTHERS, {})
LIBRARIES = {
    "transformers": transformers.LIBRARY, "diffusers": diffusers.LIBRARY, "timm": timm.LIBRARY, "others": OTHERS,
}  # fmt: skip
TABLES = {
    "transformers": "transformers/known.py",
    "diffusers": "diffusers/known.py",
    "timm": "_known_timm.py",
    "others": "_known.py",
}
FILES = {"transformers": "models/*/modeling_*.py", "diffusers": "models/**/*.py", "timm": "layers/*.py"}


def functions_of(module: types.ModuleType, pattern: re.Pattern) -> Iterator[tuple[str, types.FunctionType]]:
    """Yields the functions of a module with such a name, also those that its methods define."""
    for name, value in [*vars(module).items()]:
        if getattr(value, "__module__", "") != module.__name__:
            continue
        methods = vars(value).values() if isinstance(value, type) else [value]
        for function in (plain(f) for f in methods if inspect.isfunction(plain(f))):
            if pattern.search(function.__name__) and not isinstance(value, type):
                yield name, function
            for code in [*nested(function.__code__)][1:]:
                if pattern.search(code.co_name) and not code.co_freevars:
                    yield code.co_name, types.FunctionType(code, function.__globals__)


def modules_of(library: str) -> Iterator[types.ModuleType]:
    if library == "timm":
        sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "exhaustive" / "models")]
        importlib.import_module("vision_models")  # it imports timm without torchvision
    folder = Path(importlib.import_module(library).__path__[0])
    for file in sorted(folder.glob(FILES[library])):
        if re.search("rotary|rope|rotate|apply_rot", file.read_text()):
            try:
                yield importlib.import_module(".".join([library, *file.relative_to(folder).with_suffix("").parts]))
            except Exception as error:
                print(f"{file.name} is not imported: {error}", file=sys.stderr)


def loaded(path: str) -> types.ModuleType:
    """Returns the module of a file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts_of(library: str, others: list[str]) -> dict[str, dict]:
    """Returns the texts of an installed library, or of other files: what each does, its name, and its files."""
    of_library, found = LIBRARIES[library], dict[str, dict]()
    for module in map(loaded, others) if others else modules_of(library):
        for name, function in functions_of(module, of_library.rotary):
            if function.__code__.co_argcount < 2:  # a helper
                continue
            try:
                text = text_of(function)
            except NoText as error:
                print(f"{name} of {module.__name__} has no text: {error}", file=sys.stderr)
                continue
            stem = module.__name__.rpartition(".")[2].removeprefix("modeling_").removeprefix("transformer_")
            file = "" if others else stem
            if text not in found:
                known = of_library.known.get(text) or trial.found(function)
                if isinstance(known, str):
                    known = of_library.unsupported.get(text, known)
                found[text] = {"does": repr(known), "name": re.sub(r"__\d+$", "", name), "files": []}
            found[text]["files"] += [file] * (file not in ["", *found[text]["files"]])
    return found


def releases(folders: list[str], library: str, others: list[str]) -> dict[str, dict]:
    """Returns the texts of all releases, each of which a process of its own reads."""
    merged: dict[str, dict] = {}
    for folder in (*folders, ""):
        paths = [folder, str(ROOT), str(ROOT / "tests")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "known", "--read", library, "--others", *others]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        release, texts = json.loads(done.stdout.splitlines()[-1])
        print(f"{library} {release}: {len(texts)} texts", file=sys.stderr)
        for text, of_text in texts.items():
            entry = merged.setdefault(text, of_text | {"files": [], "releases": []})
            entry["files"] = sorted({*entry["files"], *of_text["files"]})
            entry["releases"] += [release]
    return merged


def written(library: str, merged: dict[str, dict]) -> str:
    """Returns the text of a table: that which is there, with what was found."""
    known, unsupported = dict(LIBRARIES[library].known), LIBRARIES[library].unsupported
    for text, found in merged.items():
        does = eval(found["does"], vars(trial))
        if isinstance(does, Known):
            before = known.get(text, does)
            files = sorted({*before.files.split(), *found["files"]})
            of = sorted({*before.releases.split(), *filter(None, found["releases"])}, key=_number)
            known[text] = does._replace(name=found["name"], files=" ".join(files), releases=" ".join(of))
        elif text not in unsupported:
            print(f"{library}: {found['name']} of {', '.join(found['files'])} ({text}): {does}", file=sys.stderr)
    lines = [f"{text!r}: {_entry(k)}," for text, k in sorted(known.items(), key=lambda i: (-len(i[1].files), i[0]))]
    tables = "FUNCTIONS = {\n" + "\n".join(lines) + "\n}\n"
    if library != "others":
        whys = "".join(f"{text!r}: {why!r},\n" for text, why in unsupported.items())
        tables += f"# Why torch_rope does not support these.\nUNSUPPORTED: dict[str, str] = {{\n{whys}}}\n"
    return (
        HEAD.format(".." if "/" in TABLES[library] else ".", library.replace("others", "other people's code")) + tables
    )


def _entry(known: Known) -> str:
    """Returns an entry of a table, without the members that have their defaults."""
    defaults = Known._field_defaults
    rounds = known.rounds
    of = (
        f"{{{', '.join(f'{form!r}: {_rounds(r)}' for form, r in rounds.items())}}}"
        if isinstance(rounds, dict)
        else _rounds(rounds)
    )
    more = [f"{n}={v!r}" for n, v in known._asdict().items() if n in defaults and v != defaults[n]]
    return f"Known({', '.join([repr(known.convention), of, *more])})"


def _rounds(rounds) -> str:
    more = [f"{n}={v!r}" for n, v in rounds._asdict().items() if v != rounds._field_defaults[n]]
    return f"Rounds({', '.join(more)})"


def _number(release: str) -> tuple:
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("."))


def main() -> None:
    parser = argparse.ArgumentParser(prog="make known", description=__doc__)
    parser.add_argument("--read", help="prints the texts of one installed library, for this program itself")
    parser.add_argument("--folders", nargs="*", default=[], help="of unpacked releases, which a PYTHONPATH may have")
    parser.add_argument("--library", default="transformers diffusers timm", help="some of these")
    parser.add_argument(
        "--others", nargs="*", default=[], help="files of other people's code, in the place of a library"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.read:
        texts = texts_of(options.read, options.others)
        installed = "" if options.others else importlib.import_module(options.read).__version__
        print(json.dumps([".".join(installed.split(".")[:2]), texts]))
        return
    for library in ["others"] if options.others else options.library.split():
        folders = [folder for folder in options.folders if Path(folder, library).is_dir()]
        text = written(library, releases(folders, library, options.others))
        file = ROOT / "torch_rope" / "integrations" / TABLES[library]
        file.write_text(text)
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(file)], check=False)


if __name__ == "__main__":
    main()
