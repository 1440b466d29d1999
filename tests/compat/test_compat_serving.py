"""`longspan run`, `import longspan.compat.auto`, and what they leave behind: nothing."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.compat import import_hook


def longspan(*arguments, **how):
    return subprocess.run(
        [sys.executable, "-m", "longspan", *map(str, arguments)], capture_output=True, text=True, timeout=120, **how
    )


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_run_gives_the_script_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7\n")
    path = script(tmp_path, "import sys, beside\nprint(sys.argv[1:], beside.value, __name__, nn.Linear.__name__)\n")
    done = longspan("run", path, "--device", "here", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--device', 'here', '-x'] 7 __main__ Linear\n"


def test_run_passes_on_errors_and_exit_codes(tmp_path):
    with pytest.raises(SystemExit, match="5"):
        main(["run", str(script(tmp_path, "raise SystemExit(5)"))])
    done = longspan("run", script(tmp_path, "raise ValueError('theirs')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: theirs" in done.stderr


def test_run_refuses_what_there_is_not(tmp_path, capsys):
    for words, message in (
        ([str(tmp_path / "none.py")], "script not found"),
        (["--device", "tpu", str(script(tmp_path, "pass"))], """device must be "cpu" or "cuda", got 'tpu'"""),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["run", *words])
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_cuda_means_the_cpu():
    with import_hook.use_device("cpu"):
        x = torch.zeros(2, 3).cuda()
        assert x.device.type == "cpu"
        assert x.to("cuda").device.type == "cpu"
        assert x.to(torch.device("cuda", 0), torch.float64).dtype == torch.float64
        assert torch.ones(2, device="cuda:0").device.type == "cpu"
        assert torch.nn.Linear(2, 3).cuda().weight.device.type == "cpu"
        assert torch.nn.Linear(2, 3).to("cuda").weight.device.type == "cpu"


@pytest.mark.parametrize("name", sorted(import_hook.REPLACEMENTS))
def test_served_names_are_ours_and_then_gone(name):
    before = dict(sys.modules), list(sys.meta_path)
    with import_hook.redirect_imports():
        module = __import__(name)
        assert module.__name__ == f"longspan.compat.{name}"
        assert module.__spec__.name == f"longspan.compat.{name}"
        assert sys.modules[name] is module
    assert sys.meta_path == before[1]
    assert {key for key in sys.modules if key.split(".")[0] == name} == {
        key for key in before[0] if key.split(".")[0] == name
    }


def test_submodules_are_served_and_strangers_are_not():
    with import_hook.redirect_imports():
        from performer_pytorch.autoregressive_wrapper import AutoregressiveWrapper

        assert AutoregressiveWrapper.__module__.startswith("longspan.compat")
        with pytest.raises(ModuleNotFoundError, match=r"performer_pytorch\.nonsense"):
            importlib.import_module("performer_pytorch.nonsense")


def test_auto_serves_a_process_and_says_when_it_comes_too_late(tmp_path):
    text = "import longspan.compat.auto\nimport linformer\nprint(linformer.__name__)\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "longspan.compat.linformer\n"
    text = "import sys, types\nsys.modules['linformer'] = types.ModuleType('linformer')\nimport longspan.compat.auto\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 1
    assert "linformer was already imported: import longspan.compat.auto before it" in done.stderr


def test_the_framework_is_read_off_the_script():
    assert import_hook.imported_packages("import mindspore as ms\nfrom local_attention import LocalAttention") == {
        "mindspore",
        "local_attention",
    }
    assert import_hook.imported_packages("def f():\n    from torch.nn import functional\n") == {"torch"}
    assert import_hook.imported_packages("not python at all") == set()


def test_run_serves_mindspore_scripts_without_torch(tmp_path):
    path = script(tmp_path, "try:\n    import mindspore\nexcept ImportError:\n    pass\nprint('nn' in globals())\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from pathlib import Path; from longspan.compat import import_hook; import_hook.run(Path({str(path)!r}), [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


ENCODED = {
    "latin-1": (b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n", "'\\xe9'\n"),
    "byte order mark": (b"\xef\xbb\xbfprint('marked')\n", "marked\n"),
}


@pytest.mark.parametrize("name", ENCODED)
def test_run_reads_declared_encodings(name, tmp_path, capsys):
    source, printed = ENCODED[name]
    path = tmp_path / "script.py"
    path.write_bytes(source)
    import_hook.run(path, [])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"x = '\xe9'\n", "codec can't decode byte 0xe9"),
        (b"# coding: nonsense\n", "unknown encoding: nonsense"),
        (b"x = 1\n\nx y\n", 'script.py", line 3\n    x y\n      ^\nSyntaxError: invalid syntax'),
        (b"x = 1\0\n", "null bytes"),
    ],
)
def test_run_reports_what_is_not_python_as_python_does(source, message, tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_bytes(source)
    with pytest.raises(SystemExit) as left:
        import_hook.run(path, [])
    assert left.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_run_says_what_it_cannot_read(tmp_path, monkeypatch):
    path = script(tmp_path, "pass")
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(import_hook.UsageError, match=r"cannot read .*script\.py: Permission denied"):
        import_hook.run(path, [])


VENDORED = "class PerformerLM:\n    where = 'vendored'\n"
ASKS = "from performer_pytorch import PerformerLM\nprint(getattr(PerformerLM, 'where', PerformerLM.__module__))\n"
OURS = "longspan.compat.performer_pytorch.performer_pytorch\n"


def vendor(folder: Path, layout: str) -> Path:
    """Write a copy of a library into a folder; return its path."""
    if layout == "module":
        copy = folder / "performer_pytorch.py"
        copy.write_text(VENDORED)
        return copy
    copy = folder / "performer_pytorch"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("from performer_pytorch.performer_pytorch import PerformerLM\n")
    (copy / "performer_pytorch.py").write_text(VENDORED)
    return copy


@pytest.mark.parametrize("layout", ["package", "module"])
def test_a_copy_beside_the_script_is_kept(layout, tmp_path, capsys):
    copy, path = vendor(tmp_path, layout), script(tmp_path, ASKS + ASKS)
    import_hook.run(path, [])
    out, error = capsys.readouterr()
    assert out == "vendored\nvendored\n"
    assert error == (
        f"longspan: performer_pytorch is the project's own copy in {copy}; longspan run --replace uses longspan's "
        "instead\n"
    )
    import_hook.run(path, [], replace=True)
    assert capsys.readouterr() == (OURS + OURS, "")


def test_copies_elsewhere_in_a_project_are_kept_and_other_libraries_replaced(tmp_path, monkeypatch, capsys):
    """On PYTHONPATH, in a folder that the script adds, in its package; and a package without __init__.py."""
    sources = tmp_path / "src"
    vendor(sources, "package")
    others = "import linformer\nprint(linformer.__name__)\n"
    (tmp_path / "app").mkdir()
    path = script(tmp_path / "app", ASKS + others)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(sources))
        import_hook.run(path, [])
    assert capsys.readouterr().out == "vendored\nlongspan.compat.linformer\n"
    import_hook.run(script(tmp_path / "app", f"import sys\nsys.path.append({str(tmp_path)!r})\n" + ASKS), [])
    assert capsys.readouterr().out == OURS
    import_hook.run(script(tmp_path / "app", f"import sys\nsys.path.insert(0, {str(sources)!r})\n" + ASKS), [])
    assert capsys.readouterr().out == "vendored\n"
    (sources / "performer_pytorch" / "__init__.py").unlink()
    inside = "from performer_pytorch.performer_pytorch import PerformerLM\nprint(PerformerLM.where)\n"
    monkeypatch.setattr(import_hook.PathFinder, "find_spec", without_site_packages(import_hook.PathFinder.find_spec))
    import_hook.run(script(sources, inside), [])
    assert capsys.readouterr().out == "vendored\n"
    vendor(tmp_path / "app" / "models", "package")
    relative = "from models.performer_pytorch.performer_pytorch import PerformerLM\nprint(PerformerLM.where)\n"
    import_hook.run(script(tmp_path / "app", relative + ASKS), [])
    assert capsys.readouterr() == (f"vendored\n{OURS}", "")


def without_site_packages(find):
    """Python's search without the originals that are installed here."""

    def find_spec(name, path=None, target=None):
        folders = [folder for folder in sys.path if "site-packages" not in folder] if path is None else path
        return find(name, folders if name.partition(".")[0] in import_hook.REPLACEMENTS else path, target)

    return find_spec


@pytest.mark.parametrize("metadata", ["performer_pytorch-1.1.4.dist-info", "performer_pytorch.egg-info"])
def test_an_installed_library_is_replaced_wherever_it_is(metadata, tmp_path, monkeypatch, capsys):
    """`pip install --target`, and a checkout installed with `pip install -e`."""
    installed = tmp_path / "libraries"
    vendor(installed, "package")
    (installed / metadata).mkdir()
    name = "METADATA" if metadata.endswith("dist-info") else "PKG-INFO"
    (installed / metadata / name).write_text("Metadata-Version: 2.1\nName: performer-pytorch\nVersion: 1.1.4\n")
    monkeypatch.syspath_prepend(str(installed))
    import_hook.run(script(tmp_path, ASKS), [])
    assert capsys.readouterr() == (OURS, "")


def test_a_folder_of_results_beside_the_script_is_no_package(tmp_path, monkeypatch, capsys):
    (tmp_path / "performer_pytorch").mkdir()
    (tmp_path / "performer_pytorch" / "loss.csv").write_text("1\n")
    monkeypatch.setattr(import_hook.PathFinder, "find_spec", without_site_packages(import_hook.PathFinder.find_spec))
    import_hook.run(script(tmp_path, ASKS), [])
    assert capsys.readouterr() == (OURS, "")


def test_auto_keeps_copies_too(tmp_path):
    vendor(tmp_path, "package")
    code = "import longspan.compat.auto\n" + ASKS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "vendored\n", done.stderr
    assert done.stderr.startswith("longspan: performer_pytorch is the project's own copy in ")


def test_fromstring_reads_bytes_inside_run_only(tmp_path, capsys):
    """As enwik8 scripts of the older libraries read their data."""
    import numpy as np

    before = np.fromstring
    text = (
        "import numpy as np\n"
        "x = np.fromstring(b'ab', dtype=np.uint8)\n"
        "x[0] = 7\n"
        "print(x.tolist(), np.fromstring('1 2', dtype=int, sep=' ').tolist())\n"
        "print(np.fromstring(b'abcd', np.uint8, 3).tolist(), np.fromstring('a', dtype=np.uint8).tolist())\n"
    )
    import_hook.run(script(tmp_path, text), [])
    assert capsys.readouterr().out == "[7, 98] [1, 2]\n[97, 98, 99] [97]\n"
    assert np.fromstring is before


def test_run_builds_faithful_models_on_request(tmp_path, capsys):
    path = script(tmp_path, "from longspan.compat.faithful import resolve_faithful\nprint(resolve_faithful(None))\n")
    for faithful in (True, False):
        import_hook.run(path, [], faithful=faithful)
        assert capsys.readouterr().out == f"{faithful}\n"
    path = script(tmp_path, "import mindspore\n")
    with pytest.raises(import_hook.UsageError, match=r"faithful models only for PyTorch.*imports mindspore: omit the"):
        import_hook.run(path, [], faithful=True)


def test_run_takes_switches(tmp_path, monkeypatch, capsys):
    from longspan.cli import run

    calls = []
    monkeypatch.setattr(import_hook, "run", lambda *given, **options: calls.append((given, options)))
    run.main(["--faithful", "--device=cpu", "--replace", "a.py", "--replace"])
    run.main(["a.py"])
    assert calls == [
        ((Path("a.py"), ["--replace"]), {"device": "cpu", "faithful": True, "replace": True}),
        ((Path("a.py"), []), {"device": None, "faithful": False, "replace": False}),
    ]
    for words, message in (
        (["--faithful=1", "a.py"], "--faithful takes no value, got '1'"),
        (["--replac", "a.py"], "unknown flag --replac (did you mean '--replace'?)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run.main(words)
        assert message in capsys.readouterr().err
