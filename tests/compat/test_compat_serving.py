"""`longspan run`, `import longspan.compat.auto`, and what they leave behind: nothing."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    done = longspan("run", script(tmp_path, "raise SystemExit(5)"))
    assert done.returncode == 5
    done = longspan("run", script(tmp_path, "raise ValueError('theirs')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: theirs" in done.stderr


def test_run_refuses_a_script_that_is_not_there(tmp_path):
    done = longspan("run", tmp_path / "none.py")
    assert done.returncode == 2
    assert "script not found" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_refuses_a_device_there_is_not(tmp_path):
    done = longspan("run", "--device", "tpu", script(tmp_path, "pass"))
    assert done.returncode == 2
    assert """device must be "cpu" or "cuda", got 'tpu'""" in done.stderr


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
